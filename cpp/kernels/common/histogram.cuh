// A histogram of 1024 bins in shared memory, with the sums of 32 bins beside them, so that a warp knows how
// many items lie above its part of the bins.
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
  alignas(16) BinHit hit;  // none, unless one is located

  template <int kThreads>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kBins; i += kThreads) fine[i + threadIdx.x] = 0;
    clear_sums();
  }

  __device__ __forceinline__ void clear_sums() {
    if (threadIdx.x < 32) coarse[threadIdx.x] = 0;
    if (threadIdx.x == 0) hit.count = 0;
  }

  __device__ __forceinline__ void add(uint32_t bin) {
    atomicAdd(&fine[bin], 1u);
    atomicAdd(&coarse[bin >> 5], 1u);
  }

  __device__ __forceinline__ void add(uint32_t bin, uint32_t count) {
    atomicAdd(&fine[bin], count);
    atomicAdd(&coarse[bin >> 5], count);
  }

  // Bin of the rank-th largest item, for all threads. Every warp looks at its part of the bins, and at the
  // sums for what lies above it, at the same time. One block barrier.
  template <int kWarps>
  __device__ __forceinline__ BinHit locate(uint32_t rank, int lane, int warp) {
    constexpr int kGroups = 32 / kWarps;  // of 32 bins
    const int first = kGroups * warp;
    uint32_t count[kGroups + 1], upto[kGroups + 1];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) upto[g] = count[g] = fine[32 * (first + g) + lane];
    upto[kGroups] = count[kGroups] = coarse[lane];
    suffix_sums(upto);
    const uint32_t above_groups = upto[kGroups] - count[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t above = __shfl_sync(0xffffffffu, above_groups, first + g) + upto[g] - count[g];
      if (above < rank && rank <= above + count[g]) {
        hit = BinHit{static_cast<uint32_t>(32 * (first + g) + lane), above, count[g]};
      }
    }
    __syncthreads();
    return hit;
  }
};

}  // namespace gvr_topk
