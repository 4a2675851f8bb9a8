// Which of 256 histogram bins holds the r-th largest item.
#pragma once

#include <cstdint>

#include "common/histogram.cuh"

namespace gvr_topk {

// One warp's view of a 256-bin histogram: lane l sums bins 8l .. 8l+7. One warp scans and tells the
// others through shared memory: sixteen warps scanning for themselves fill the issue slots.
struct BinScan {
  const uint32_t* hist;
  int lane;
  uint32_t above;  // items in the bins of higher lanes
  uint32_t sum;    // items in this lane's bins

  __device__ __forceinline__ BinScan(const uint32_t* bins, int lane_id) : hist(bins), lane(lane_id) {
    const uint4 a = reinterpret_cast<const uint4*>(hist)[2 * lane];
    const uint4 b = reinterpret_cast<const uint4*>(hist)[2 * lane + 1];
    sum = (a.x + a.y + a.z + a.w) + (b.x + b.y + b.z + b.w);
    uint32_t suffix = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t higher = __shfl_down_sync(0xffffffffu, suffix, d);
      if (lane + d < 32) suffix += higher;
    }
    above = suffix - sum;
  }

  // Bin of the rank-th largest item: first the lane, then, spread over eight lanes, its bin. The count is
  // 0 when there are fewer items.
  __device__ __forceinline__ BinHit locate(uint32_t rank) const {
    const uint32_t owner = __ballot_sync(0xffffffffu, above < rank && rank <= above + sum);
    const int group = owner != 0 ? __ffs(owner) - 1 : 0;
    const uint32_t group_above = __shfl_sync(0xffffffffu, above, group);
    const uint32_t count = hist[8 * group + (lane & 7)];
    uint32_t suffix = count;
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      const uint32_t higher = __shfl_down_sync(0xffffffffu, suffix, d, 8);
      if ((lane & 7) + d < 8) suffix += higher;
    }
    const uint32_t bin_above = group_above + suffix - count;
    const uint32_t found = __ballot_sync(0xffffffffu, bin_above < rank && rank <= bin_above + count);
    const int place = found != 0 ? (__ffs(found) - 1) & 7 : 0;
    const uint32_t hit_above = __shfl_sync(0xffffffffu, bin_above, place);
    const uint32_t hit_count = __shfl_sync(0xffffffffu, count, place);
    return BinHit{static_cast<uint32_t>(8 * group + place), hit_above, owner != 0 ? hit_count : 0};
  }
};

}  // namespace gvr_topk
