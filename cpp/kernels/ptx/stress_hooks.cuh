// Points at which a stress build delays threads (GVR_TOPK_CHAOS, stress/chaos.h). They are empty in any other
// build.
#pragma once

#ifndef GVR_TOPK_CHAOS

// This point stands where one thread waits, or where another thread may be waiting for it.
#define GVR_CHAOS_POINT()
// This point stands behind a wait for all CTAs of a cluster.
#define GVR_CHAOS_JOINED()

#endif
