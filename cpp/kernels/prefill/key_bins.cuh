// A histogram over a range of keys, and the search for the bins in which two ranks lie.
#pragma once

#include "core/key_range.cuh"
#include "prefill/config.cuh"

namespace gvr_topk::prefill {

// Two ranks, counted from the greatest key down, among all keys in the range and above it.
struct RankPair {
  uint32_t upper, lower;
};

__device__ __forceinline__ void clear_key_bins(Shared& sm) {
  __syncthreads();  // The memory's previous use has ended in all threads.
#pragma unroll
  for (int i = 0; i < kKeyBins / 4; i += kThreads) {
    reinterpret_cast<uint4*>(sm.key_bins)[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    sm.above_range = 0;
    sm.hits[0] = sm.hits[1] = BinHit{0, 0, 0};
  }
  __syncthreads();
}

// Counts a key if it lies in the range. Returns whether the key lies above the range.
__device__ __forceinline__ bool count_key(Shared& sm, const KeyRange& range, int shift, uint32_t key) {
  const bool inside = range.contains(key);
  if (inside) atomicAdd(&sm.key_bins[range.bin(key, shift)], 1u);
  return !inside && key > range.base;
}

// Adds the number of keys that this thread has found above the range. All lanes take part.
__device__ __forceinline__ void add_above(Shared& sm, uint32_t above) {
  above = __reduce_add_sync(0xffffffffu, above);
  if ((threadIdx.x & 31) == 0 && above > 0) atomicAdd(&sm.above_range, above);
}

// Finds the bins of both ranks once all threads have counted, and leaves them in `hits` for all threads.
// `count` is 0 for a rank that does not lie in the range.
__device__ __forceinline__ void locate_ranks(Shared& sm, const RankPair& ranks) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  __syncthreads();
  uint32_t bin[8];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += bin[i] = sm.key_bins[8 * thread + i];
  const uint32_t upto = ptx::suffix_sum(sum);
  if (lane == 0) sm.warp_sums[0][warp] = upto;
  __syncthreads();
  const uint32_t higher = warp < lane && lane < kWarps ? sm.warp_sums[0][lane] : 0;
  const uint32_t above = sm.above_range + __reduce_add_sync(0xffffffffu, higher) + upto - sum;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t rank = r == 0 ? ranks.upper : ranks.lower;
    if (above < rank && rank <= above + sum) {
      BinHit hit{8u * thread, above, 0};
#pragma unroll
      for (int i = 7; i >= 0; --i) {
        if (hit.count == 0) {
          if (rank <= hit.above + bin[i]) {
            hit.bin += i;
            hit.count = bin[i];
          } else {
            hit.above += bin[i];
          }
        }
      }
      sm.hits[r] = hit;
    }
  }
  __syncthreads();
}

}  // namespace gvr_topk::prefill
