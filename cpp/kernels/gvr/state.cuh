// Shared memory and block-wide helpers of the four-phase kernel.
//
// The kernel is the paper's: one CTA of 512 threads per row, which it reads once per counting pass and
// once to collect. It shares the row layout, the emission of short rows and, for rows its search gives
// up on, the radix rounds with the cluster kernel, as a cluster of one.
#pragma once

#include "cluster/general.cuh"
#include "gvr/bin_scan.cuh"

namespace gvr_topk::gvr {

using cluster::kThreads;
using cluster::kWarps;
using cluster::Sink;

constexpr int kCapacity = 6144;  // candidates refinement holds: three times k (paper, section 5.3)
constexpr int kBins = 2048;
constexpr int kHintPerThread = 2048 / kThreads;
constexpr int kPerThread = kCapacity / kThreads;
constexpr int kSnapLimit = 32;  // members of a bin that snap steps may walk through
constexpr int kSecantPasses = 4;
constexpr int kFloatPasses = 8;
constexpr int kBitmapWords = static_cast<int>(kFourPhaseMaxWidth / 32);

// How the search for the threshold ended; the names are gvr_topk.reference.DONE's.
enum class Done : int { kShort, kGuess, kSecant, kTie, kBisect, kKey, kPlateau };

struct alignas(16) Shared {
  uint32_t key[kCapacity];
  int32_t position[kCapacity];
  uint32_t bins[kBins];
  uint32_t coarse[256];  // sums of eight bins
  uint32_t warp_value[4][kWarps];
  double warp_sum[kWarps];
  BinHit hit;
};

struct Bitmaps {
  uint32_t above[kBitmapWords];  // one bit per element: above the k-th value
  uint32_t equal[kBitmapWords];  // equal to it
};

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float positive_infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

enum class Reduce { kAdd, kMin, kMax };

template <Reduce kOp>
__device__ __forceinline__ uint32_t warp_reduce(uint32_t x) {
  if constexpr (kOp == Reduce::kAdd) return __reduce_add_sync(0xffffffffu, x);
  if constexpr (kOp == Reduce::kMin) return __reduce_min_sync(0xffffffffu, x);
  return __reduce_max_sync(0xffffffffu, x);
}

// Reduces one value per thread over the block; `slot` tells reductions apart that share a barrier.
template <Reduce kOp>
__device__ __forceinline__ void leave(Shared& sm, int slot, uint32_t x) {
  x = warp_reduce<kOp>(x);
  if ((threadIdx.x & 31) == 0) sm.warp_value[slot][threadIdx.x >> 5] = x;
}

template <Reduce kOp>
__device__ __forceinline__ uint32_t take(const Shared& sm, int slot) {
  constexpr uint32_t kNeutral = kOp == Reduce::kMin ? 0xffffffffu : 0;
  const int lane = threadIdx.x & 31;
  return warp_reduce<kOp>(lane < kWarps ? sm.warp_value[slot][lane] : kNeutral);
}

template <Reduce kOp>
__device__ __forceinline__ uint32_t block_reduce(Shared& sm, uint32_t x) {
  leave<kOp>(sm, 0, x);
  __syncthreads();
  const uint32_t result = take<kOp>(sm, 0);
  __syncthreads();
  return result;
}

// Sum of the values of all threads before this one.
__device__ __forceinline__ uint32_t exclusive_sum(Shared& sm, uint32_t x) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t upto = inclusive_scan(x);
  if (lane == 31) sm.warp_value[0][warp] = upto;
  __syncthreads();
  const uint32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? sm.warp_value[0][lane] : 0);
  __syncthreads();
  return before + upto - x;
}

// Bin that holds the rank-th largest of the items in `bins`.
__device__ __forceinline__ BinHit locate(Shared& sm, uint32_t rank) {
  if (threadIdx.x < 256) {
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += sm.bins[8 * threadIdx.x + i];
    sm.coarse[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    BinHit hit = BinScan(sm.coarse, threadIdx.x).locate(rank);
    int bin = 8 * hit.bin + 7;
    uint32_t above = hit.above;
    while (rank > above + sm.bins[bin]) above += sm.bins[bin--];
    if (threadIdx.x == 0) sm.hit = BinHit{static_cast<uint32_t>(bin), above, sm.bins[bin]};
  }
  __syncthreads();
  return sm.hit;
}

__device__ __forceinline__ void clear_bins(Shared& sm) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) sm.bins[i] = 0;
  __syncthreads();
}

}  // namespace gvr_topk::gvr
