// A histogram of 1024 bins in shared memory, two for every thread of a block of 512. `coarse` holds the sum
// of each warp's bins, so that a warp knows how many items lie above its own bins.
#pragma once

#include <cstdint>

#include "ptx/warp_scan.cuh"

namespace gvr_topk {

struct BinHit {
  uint32_t bin;
  uint32_t above;  // items in higher bins
  uint32_t count;  // items in the bin; 0 when there are fewer items than the rank
};

struct Histogram {
  static constexpr int kBins = 1024;
  static constexpr int kLog2Bins = 10;
  static constexpr int kLog2Group = 6;  // bins of one warp
  static constexpr int kGroups = kBins >> kLog2Group;

  // Items that must not be counted are added to bin kBins, which nobody reads. A branch around an addition
  // costs more than the addition, even if all threads meet in this one bin.
  uint32_t fine[kBins + 4];
  uint32_t coarse[kGroups + 4];
  alignas(16) BinHit hit;  // `count` is 0 until a bin is located

  template <int kThreads>
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kBins; i += kThreads) fine[i + threadIdx.x] = 0;
    clear_sums();
  }

  __device__ __forceinline__ void clear_sums() {
    if (threadIdx.x < kGroups) coarse[threadIdx.x] = 0;
    if (threadIdx.x == 0) hit.count = 0;
  }

  __device__ __forceinline__ void add(uint32_t bin, uint32_t count = 1) {
    atomicAdd(&fine[bin], count);
    atomicAdd(&coarse[bin >> kLog2Group], count);
  }

  // Finds the bin of the rank-th largest item and returns it to all threads. It contains one block barrier.
  __device__ __forceinline__ BinHit locate(uint32_t rank, int thread) {
    const int lane = thread & 31, warp = thread >> 5;
    const uint2 two = reinterpret_cast<const uint2*>(fine)[thread];
    const uint32_t sum = two.x + two.y;
    const uint32_t upto = ptx::suffix_sum(sum);
    const uint32_t higher = warp < lane && lane < kGroups ? coarse[lane] : 0;
    const uint32_t above = __reduce_add_sync(0xffffffffu, higher) + upto - sum;
    if (above < rank && rank <= above + sum) {
      const uint32_t bin = 2 * thread;
      hit = rank <= above + two.y ? BinHit{bin + 1, above, two.y} : BinHit{bin, above + two.y, two.x};
    }
    __syncthreads();
    return hit;
  }
};

}  // namespace gvr_topk
