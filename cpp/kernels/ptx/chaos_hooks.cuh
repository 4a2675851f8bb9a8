// Points at which a chaos build delays threads (GVR_TOPK_CHAOS, stress/chaos.h). They are empty in any other
// build.
#pragma once

#ifndef GVR_TOPK_CHAOS

// Stands beside whatever one thread waits for, or another thread may be waiting for.
#define GVR_CHAOS_POINT()
// Stands behind a wait for all CTAs of a cluster.
#define GVR_CHAOS_JOINED()

#endif
