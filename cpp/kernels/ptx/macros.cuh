// What device code is written with.
#pragma once

// A function of device code. All are inlined, but for those that are out of line for a reason of their own.
#define GVR_DEVICE __device__ __forceinline__

// An instruction under the predicate that a comparison of two operands sets.
#define GVR_PREDICATED(comparison, operands, instruction) \
  "{\n .reg .pred p;\n setp." comparison " p, " operands ";\n @p " instruction ";\n}"

// Points at which a stress build delays threads (GVR_TOPK_CHAOS, stress/chaos.h). They are empty in any other
// build.
#ifndef GVR_TOPK_CHAOS

// This point stands where one thread waits, or where another thread may be waiting for it.
#define GVR_CHAOS_POINT()
// This point stands behind a wait for all CTAs of a cluster.
#define GVR_CHAOS_JOINED()

#endif
