// Points at which a stress build delays threads (GVR_TOPK_CHAOS, stress/chaos.h) or counts lanes
// (GVR_TOPK_CHECK_CONVERGED, stress/converged.h). They are empty in any other build.
#pragma once

#ifndef GVR_TOPK_CHAOS

// This point stands where one thread waits, or where another thread may be waiting for it.
#define GVR_CHAOS_POINT()
// This point stands behind a wait for all CTAs of a cluster.
#define GVR_CHAOS_JOINED()

#endif

#ifndef GVR_TOPK_CHECK_CONVERGED

// This point stands before a collective of a warp that is written in assembly.
#define GVR_COLLECTIVE()

#endif
