// A histogram of 1024 bins in shared memory, with the sums of 32 bins beside them, so that a warp finds
// the bin of a rank in two looks and without a barrier.
#pragma once

#include <cstdint>

#include "common/scan.cuh"

namespace gvr_topk {

struct BinHit {
  uint32_t bin;
  uint32_t above;  // items in higher bins
  uint32_t count;  // items in the bin; 0 when there are fewer items than the rank
};

struct Histogram {
  static constexpr int kBins = 1024;
  static constexpr int kLog2Bins = 10;

  // What is not to be counted goes to bin kBins, that nobody reads: a branch around an addition costs more
  // than the addition, even where they all meet in one bin.
  uint32_t fine[kBins + 4];
  uint32_t coarse[32 + 4];

  template <int kThreads>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kBins; i += kThreads) fine[i + threadIdx.x] = 0;
    if (threadIdx.x < 32) coarse[threadIdx.x] = 0;
  }

  __device__ __forceinline__ void add(uint32_t bin) {
    atomicAdd(&fine[bin], 1u);
    atomicAdd(&coarse[bin >> 5], 1u);
  }

  __device__ __forceinline__ void add(uint32_t bin, uint32_t count) {
    atomicAdd(&fine[bin], count);
    atomicAdd(&coarse[bin >> 5], count);
  }

  // Bin of the rank-th largest item; the same for all lanes.
  __device__ __forceinline__ BinHit locate(uint32_t rank, int lane) const {
    const uint32_t sum = coarse[lane];
    const uint32_t upto = suffix_sum(sum);
    const uint32_t owner = __ballot_sync(0xffffffffu, upto - sum < rank && rank <= upto);
    const int group = owner != 0 ? __ffs(owner) - 1 : 0;
    const uint32_t group_above = __shfl_sync(0xffffffffu, upto - sum, group);
    const uint32_t count = fine[32 * group + lane];
    const uint32_t above = group_above + suffix_sum(count) - count;
    const uint32_t found = __ballot_sync(0xffffffffu, above < rank && rank <= above + count);
    const int place = found != 0 ? __ffs(found) - 1 : 0;
    const uint32_t hit_above = __shfl_sync(0xffffffffu, above, place);
    const uint32_t hit_count = __shfl_sync(0xffffffffu, count, place);
    return BinHit{static_cast<uint32_t>(32 * group + place), hit_above, owner != 0 ? hit_count : 0};
  }
};

}  // namespace gvr_topk
