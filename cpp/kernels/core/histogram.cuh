// Finds the bin of a histogram in shared memory that holds the item of a given rank, counted from the largest
// item down. Every thread takes a few consecutive bins, a scan over the warp and the sums of the warps tell
// it how many items lie above them, and the thread whose bins hold the rank steps through them.
#pragma once

#include <cstdint>

#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

struct BinHit {
  uint32_t bin;
  uint32_t above;  // items in higher bins
  uint32_t count;  // items in the bin; 0 when there are fewer items than the rank
};

// The counts of consecutive bins. One or two loads bring them from shared memory.
template <int kCount>
struct alignas(sizeof(uint32_t) * (kCount < 4 ? kCount : 4)) BinCounts {
  uint32_t bin[kCount];
};

// The consecutive bins of one thread.
template <int kCount>
struct ThreadBins {
  BinCounts<kCount> counts;
  uint32_t first;    // number of the first bin
  uint32_t sum = 0;  // items in all of them
  uint32_t above;    // items in higher bins

  // Takes the bins of the thread with this index. `above` covers the bins of the same warp. All lanes take
  // part.
  GVR_DEVICE ThreadBins(const uint32_t* bins, int index)
      : counts(reinterpret_cast<const BinCounts<kCount>*>(bins)[index]), first(kCount * index) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += counts.bin[i];
    above = ptx::suffix_sum(sum) - sum;
  }

  // Adds the bins of the warps above to `above`. All lanes take part.
  GVR_DEVICE void add_warps_above(const uint32_t* warp_sums, int warps, int warp, int lane) {
    above += __reduce_add_sync(0xffffffffu, warp < lane && lane < warps ? warp_sums[lane] : 0);
  }

  // Whether the rank-th largest item lies in these bins.
  GVR_DEVICE bool holds(uint32_t rank) const { return above < rank && rank <= above + sum; }

  // The bin of that item. The bins must hold it.
  GVR_DEVICE BinHit find(uint32_t rank) const {
    BinHit hit{first + kCount - 1, above, counts.bin[kCount - 1]};
#pragma unroll
    for (int i = kCount - 2; i >= 0; --i) {
      if (rank > hit.above + hit.count) hit = BinHit{first + i, hit.above + hit.count, counts.bin[i]};
    }
    return hit;
  }

  // Stores that bin in shared memory if these bins hold it. All lanes take part, and those of one warp
  // search.
  GVR_DEVICE void publish(uint32_t rank, BinHit& hit) const {
    const bool here = holds(rank);
    if (!__any_sync(0xffffffffu, here)) return;
    const BinHit found = find(rank);
    ptx::store_shared_if(here, ptx::shared_address(&hit.bin), found.bin);
    ptx::store_shared_if(here, ptx::shared_address(&hit.above), found.above);
    ptx::store_shared_if(here, ptx::shared_address(&hit.count), found.count);
  }
};

// Finds the bin of the rank-th largest item among the bins of a block, `kCount` for each thread, and returns
// it to all threads by way of `hit`. All threads have counted, and a block barrier has passed. `meanwhile`
// runs before the first of two more barriers, and may clear other bins.
template <int kCount, int kBlockWarps, typename Meanwhile>
GVR_DEVICE BinHit locate_in_block(const uint32_t* bins, uint32_t (&warp_sums)[kBlockWarps], BinHit& hit,
                                  uint32_t rank, int warp, int lane, Meanwhile meanwhile) {
  ThreadBins<kCount> own(bins, 32 * warp + lane);
  if (lane == 0) warp_sums[warp] = own.above + own.sum;
  meanwhile();
  __syncthreads();
  own.add_warps_above(warp_sums, kBlockWarps, warp, lane);
  own.publish(rank, hit);
  __syncthreads();
  return hit;
}

// A histogram of 1024 bins, two for every thread of a block of 512. Items are also added to the sums of the
// warps' bins, so that a search takes one block barrier.
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
  GVR_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kBins; i += kThreads) fine[i + threadIdx.x] = 0;
    if (threadIdx.x < kGroups) coarse[threadIdx.x] = 0;
    if (threadIdx.x == 0) hit.count = 0;
  }

  GVR_DEVICE void add(uint32_t bin, uint32_t count = 1) {
    atomicAdd(&fine[bin], count);
    atomicAdd(&coarse[bin >> kLog2Group], count);
  }

  // Finds the bin of the rank-th largest item and returns it to all threads. It contains one block barrier.
  GVR_DEVICE BinHit locate(uint32_t rank, int thread) {
    ThreadBins<2> own(fine, thread);
    own.add_warps_above(coarse, kGroups, thread >> 5, thread & 31);
    own.publish(rank, hit);
    __syncthreads();
    return hit;
  }
};

}  // namespace gvr_topk
