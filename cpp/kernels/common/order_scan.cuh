// Ranks, in index order, of the set bits of a warp's word.
#pragma once

#include <cstdint>

#include "common/key.cuh"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// Per-vector population counts of `bits`, packed so that one 32-bit addition adds several fields:
// vectors 0, 2, .. in `even` and 1, 3, .. in `odd`. A field holds the sum over a warp: at most 128 in
// 8 bits (fp32) or 256 in 16 bits (16-bit types).
template <typename T>
__device__ __forceinline__ void packed_counts(uint32_t bits, uint32_t& even, uint32_t& odd) {
  uint32_t x = bits - ((bits >> 1) & 0x55555555u);
  x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  if constexpr (sizeof(T) == 4) {
    even = x & 0x0f0f0f0fu;
    odd = (x >> 4) & 0x0f0f0f0fu;
  } else {
    x = (x + (x >> 4)) & 0x0f0f0f0fu;
    even = x & 0x00ff00ffu;
    odd = (x >> 8) & 0x00ff00ffu;
  }
}

__device__ __forceinline__ uint32_t inclusive_scan(uint32_t value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, value, d);
    if (lane >= d) value += below;
  }
  return value;
}

// Calls `visit(bit, rank)` for every set bit of this lane, where rank counts the set bits of the
// whole warp that come earlier in index order. All lanes take part; returns the warp's total.
template <typename T, typename Visit>
__device__ __forceinline__ uint32_t for_each_in_order(uint32_t bits, int lane, Visit visit) {
  constexpr int kVecs = kValuesPerThread / kPerVec<T>;
  constexpr int kFieldBits = sizeof(T) == 4 ? 8 : 16;
  constexpr uint32_t kFieldMask = (1u << kFieldBits) - 1;
  constexpr uint32_t kVecMask = (1u << kPerVec<T>)-1;
  if (__ballot_sync(0xffffffffu, bits != 0) == 0) return 0;
  uint32_t even, odd;
  packed_counts<T>(bits, even, odd);
  const uint32_t even_sum = inclusive_scan(even, lane);
  const uint32_t odd_sum = inclusive_scan(odd, lane);
  const uint32_t even_total = __shfl_sync(0xffffffffu, even_sum, 31);
  const uint32_t odd_total = __shfl_sync(0xffffffffu, odd_sum, 31);
  even = even_sum - even;
  odd = odd_sum - odd;
  uint32_t before = 0;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int shift = (j / 2) * kFieldBits;
    uint32_t vec = (bits >> (j * kPerVec<T>)) & kVecMask;
    uint32_t rank = before + (((j & 1 ? odd : even) >> shift) & kFieldMask);
    while (vec != 0) {
      const int e = __ffs(vec) - 1;
      visit(j * kPerVec<T> + e, rank++);
      vec &= vec - 1;
    }
    before += ((j & 1 ? odd_total : even_total) >> shift) & kFieldMask;
  }
  return before;
}

}  // namespace gvr_topk
