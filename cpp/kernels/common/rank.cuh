// The rank of one key among those of a warp.
#pragma once

#include "common/key.cuh"
#include "ptx/compare.cuh"

namespace gvr_topk {

// The rank-th largest of the keys that the first `count` lanes hold, by comparison with each other.
__device__ __forceinline__ uint32_t rank_directly(uint32_t key, int count, uint32_t rank, int lane) {
  constexpr int kAtOnce = 4;  // so that they overlap
  const uint32_t mine = lane < count ? key : kAbsentKey;
  float greater = 0.0f;
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // absent ones are greater than none
      ptx::count_if_greater(greater, __shfl_sync(0xffffffffu, mine, first + i), mine);
    }
  }
  // The least of those that fewer than `rank` are greater than.
  const bool within = lane < count && greater < static_cast<float>(rank);
  return __reduce_min_sync(0xffffffffu, within ? mine : kMaxKey);
}

}  // namespace gvr_topk
