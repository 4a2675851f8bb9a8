// Stamps of the SM clock at phase boundaries, compiled in by GVR_PHASE_TIMING only (paper, appendix H).
#pragma once

#include <cstdint>

#include "gvr_topk/params.h"

namespace gvr_topk {

struct PhaseClock {
#ifdef GVR_PHASE_TIMING
  int64_t* out;
  bool active;
  int next = 0;

  __device__ PhaseClock(int64_t* clocks, int row, bool writer)
      : out(clocks + row * kPhaseStamps), active(clocks != nullptr && writer) {}

  __device__ __forceinline__ void stamp() {
    if (active && next < kPhaseStamps) out[next++] = clock64();
  }
#else
  __device__ __forceinline__ PhaseClock(int64_t*, int, bool) {}
  __device__ __forceinline__ void stamp() {}
#endif
};

}  // namespace gvr_topk
