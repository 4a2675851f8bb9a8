// Bit sets of the elements that one lane holds.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "core/lane_ranks.cuh"

namespace gvr_topk {

constexpr uint32_t kLowerBits = 0x55555555u;

// A set of a lane's elements: each word has two bits for each of 16 elements, and the lower of the two is set
// if the element belongs to the set.
template <int kWords>
struct LaneMask {
  uint32_t word[kWords] = {};

  __device__ __forceinline__ uint32_t count() const {
    uint32_t count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) count += __popc(word[w]);
    return count;
  }

  __device__ __forceinline__ bool any() const {
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) all |= word[w];
    return all != 0;
  }
};

// Number of set elements in each vector of one word, packed into fields (kFieldBits, core/lane_ranks.cuh).
template <typename T>
__device__ __forceinline__ uint32_t packed_counts_of_pairs(uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    word = (word & 0x33333333u) + (word >> 2 & 0x33333333u);
    return (word + (word >> 4)) & 0x0f0f0f0fu;
  } else {
    return __popc(word & 0xffffu) | __popc(word >> 16) << 16;
  }
}

// Packs a word of a set from two bits per element to one. The upper bit of each pair must be clear.
__device__ __forceinline__ uint32_t single_bits(uint32_t word) {
  word = (word | word >> 1) & 0x33333333u;
  word = (word | word >> 2) & 0x0f0f0f0fu;
  word = (word | word >> 4) & 0x00ff00ffu;
  return (word | word >> 8) & 0xffffu;
}

}  // namespace gvr_topk
