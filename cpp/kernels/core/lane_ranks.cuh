// Sets of the elements that one lane holds, and ranks within a warp: of set bits in index order, and of keys
// by comparison.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "gvr_topk/policy.h"
#include "ptx/warp.cuh"

namespace gvr_topk {

// Width of a field in a packed word. The population counts of a tile's vectors are packed into the fields of
// one 32-bit word, so that one addition adds them all. A field holds the sum over a warp: at most 128 in 8
// bits (fp32: four vectors of four) or 256 in 16 bits (16-bit types: two vectors of eight).
template <typename T>
constexpr int kFieldBits = 32 * kPerVec<T> / kValuesPerThread;

template <typename T>
constexpr int kVecsOfTile = kValuesPerThread / kPerVec<T>;

template <typename T>
GVR_DEVICE uint32_t packed_counts(uint32_t bits) {
  static_assert(kValuesPerThread == 16, "a tile's vectors fill the fields of one 32-bit word");
  if constexpr (sizeof(T) == 4) {
    // Nibbles become bytes, and then population counts of bytes.
    uint32_t x = (bits | bits << 8) & 0x00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0fu;
    x = x - ((x >> 1) & 0x55555555u);
    return (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  } else {
    return __popc(bits & 0xffu) | __popc(bits >> 8) << 16;
  }
}

// Calls `visit(bit, rank)` for every set bit of this lane, where `rank` is the number of set bits of the
// whole warp that come earlier in index order. All lanes take part. Returns the warp's total. The caller
// guarantees that bits of vector `vecs` and of later vectors are clear.
template <typename T, typename Visit>
GVR_DEVICE uint32_t for_each_in_order(uint32_t bits, int vecs, int lane, Visit visit) {
  constexpr uint32_t kFieldMask = (1u << kFieldBits<T>)-1;
  constexpr uint32_t kVecMask = (1u << kPerVec<T>)-1;
  if (__ballot_sync(0xffffffffu, bits != 0) == 0) return 0;
  const uint32_t counts = packed_counts<T>(bits);
  uint32_t upto = ptx::inclusive_scan(counts);
  uint32_t total = __shfl_sync(0xffffffffu, upto, 31);
  upto -= counts;
  uint32_t before = 0;
#pragma unroll 1  // `visit` is large, and few vectors have set bits.
  for (int j = 0; j < vecs; ++j) {
    uint32_t rank = before + (upto & kFieldMask);
    for (uint32_t vec = bits & kVecMask; vec != 0; vec &= vec - 1) {
      visit(j * kPerVec<T> + __ffs(vec) - 1, rank++);
    }
    before += total & kFieldMask;
    bits >>= kPerVec<T>;
    upto >>= kFieldBits<T>;
    total >>= kFieldBits<T>;
  }
  ptx::reconverge(ptx::unknown_zero());  // Lanes have visited different numbers of bits.
  return before;
}

// How many bits the earlier lanes have set, and all lanes of the warp.
struct LaneRank {
  int before, all;
};

// All lanes take part. A scan is only needed if a lane has set several bits.
GVR_DEVICE LaneRank rank_lanes(uint32_t bits, int lane) {
  const uint32_t lanes = __ballot_sync(0xffffffffu, bits != 0);
  LaneRank rank{__popc(lanes & ((1u << lane) - 1)), __popc(lanes)};
  if (__ballot_sync(0xffffffffu, (bits & (bits - 1)) != 0) != 0) {
    const int count = __popc(bits);
    rank.before = static_cast<int>(ptx::inclusive_scan(count));
    rank.all = __shfl_sync(0xffffffffu, rank.before, 31);
    rank.before -= count;
  }
  return rank;
}

// The rank-th largest of the keys that the first `count` lanes hold, found by comparing all keys with each
// other.
GVR_DEVICE uint32_t rank_directly(uint32_t key, int count, uint32_t rank, int lane) {
  constexpr int kAtOnce = 4;  // Several shuffles at once, so that they overlap.
  const uint32_t mine = lane < count ? key : kAbsentKey;
  float greater = 0.0f;
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // An absent key is greater than no key.
      ptx::count_if_greater(greater, __shfl_sync(0xffffffffu, mine, first + i), mine);
    }
  }
  // The result is the smallest key that fewer than `rank` keys exceed.
  const bool within = lane < count && greater < static_cast<float>(rank);
  return __reduce_min_sync(0xffffffffu, within ? mine : kMaxKey);
}

constexpr uint32_t kLowerBits = 0x55555555u;

// A set of a lane's elements: each word has two bits for each of 16 elements, and the lower of the two is set
// if the element belongs to the set.
template <int kWords>
struct LaneMask {
  uint32_t word[kWords] = {};

  GVR_DEVICE uint32_t count() const {
    uint32_t count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) count += __popc(word[w]);
    return count;
  }

  GVR_DEVICE bool any() const {
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) all |= word[w];
    return all != 0;
  }
};

// Number of set elements in each vector of one word, packed into fields (kFieldBits, core/lane_ranks.cuh).
template <typename T>
GVR_DEVICE uint32_t packed_counts_of_pairs(uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    word = (word & 0x33333333u) + (word >> 2 & 0x33333333u);
    return (word + (word >> 4)) & 0x0f0f0f0fu;
  } else {
    return __popc(word & 0xffffu) | __popc(word >> 16) << 16;
  }
}

// Packs a word of a set from two bits per element to one. The upper bit of each pair must be clear.
GVR_DEVICE uint32_t single_bits(uint32_t word) {
  word = (word | word >> 1) & 0x33333333u;
  word = (word | word >> 2) & 0x0f0f0f0fu;
  word = (word | word >> 4) & 0x00ff00ffu;
  return (word | word >> 8) & 0xffffu;
}

}  // namespace gvr_topk
