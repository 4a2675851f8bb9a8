// Sets of the elements that one lane holds, and ranks within a warp: of set bits in index order, and of keys
// by comparison.
#pragma once

#include <cstdint>

#include "core/config.cuh"
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

// How many bits the earlier lanes have set, and all lanes of the warp.
struct LaneRank {
  int before, all;
};

// All lanes take part. A scan is only needed if a lane has set several bits.
GVR_DEVICE LaneRank rank_lanes(uint32_t bits, int lane) {
  const uint32_t lanes = __ballot_sync(0xffffffffu, bits != 0);
  LaneRank rank{__popc(lanes & ((1u << lane) - 1)), __popc(lanes)};
  if (lanes == 0) return rank;
  if (__ballot_sync(0xffffffffu, (bits & (bits - 1)) != 0) != 0) {
    const int count = __popc(bits);
    rank.before = static_cast<int>(ptx::inclusive_scan(count)) - count;
    rank.all = __reduce_add_sync(0xffffffffu, count);
  }
  return rank;
}

// Adds a key to those that are ranked by comparison, while there is room. `Shared` is the shared memory of a
// kernel.
template <typename Shared>
GVR_DEVICE void add_small(Shared& smem, uint32_t key) {
  const uint32_t slot = atomicAdd(&smem.few_count, 1u);
  if (slot < kRankDirectly) smem.few_keys[slot] = key;
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

// Number of set elements in each vector of one word of a set, packed into fields.
template <typename T>
GVR_DEVICE uint32_t packed_counts(uint32_t word) {
  static_assert(kValuesPerThread == 16, "a tile's vectors fill the fields of one 32-bit word");
  if constexpr (sizeof(T) == 4) {
    word = (word & 0x33333333u) + (word >> 2 & 0x33333333u);
    return (word + (word >> 4)) & 0x0f0f0f0fu;
  } else {
    return __popc(word & 0xffffu) | __popc(word >> 16) << 16;
  }
}

}  // namespace gvr_topk
