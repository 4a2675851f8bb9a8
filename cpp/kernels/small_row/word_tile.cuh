// The largest tile of elements. A row fills as many words of it as the row needs.
#pragma once

#include "small_row/cta_tile.cuh"

namespace gvr_topk::small_row {

// The elements of one lane in registers, in words of 16. Derived tiles define which positions these elements
// have.
struct WordTile {
  static constexpr int kSize = kMaxValuesPerThread;
  static constexpr int kWords = kSize / kValuesPerThread;

  int begin;             // position of the warp's first element
  int words;             // words that the row needs; elements of other words are undefined
  uint32_t bits[kSize];  // bits of the values, or the keys without their invariant low bits

  // Calls visit(index) for every element of the lane.
  template <typename Visit>
  __device__ __forceinline__ void for_each_index(Visit visit) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (w >= words) break;
#pragma unroll
      for (int i = 0; i < kValuesPerThread; ++i) visit(w * kValuesPerThread + i);
    }
  }

  // Returns `mask_of_keys` over all elements of the lane.
  template <typename SetBit>
  __device__ __forceinline__ LaneMask<kWords> mask_of(SetBit set_bit) const {
    return mask_of_keys(bits, [&](auto visit) { for_each_index(visit); }, set_bit);
  }

  // Returns the bits of the element at an index known only at run time.
  __device__ __forceinline__ uint32_t bits_at(uint32_t index) const {
    return register_at<0, kSize>(bits, index);
  }
};

}  // namespace gvr_topk::small_row
