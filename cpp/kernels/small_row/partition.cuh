// The result of rounds over a short row: elements that are certainly selected, and a few at the boundary to
// choose from.
#pragma once

#include "core/histogram.cuh"
#include "core/lane_ranks.cuh"
#include "ptx/warp.cuh"
#include "small_row/cta_tile.cuh"

namespace gvr_topk::small_row {

constexpr int kLog2Group = 7;  // bins that a warp sums up

// The bins of a block of kBlockThreads threads. Each thread sums up four. The functions below take a row of
// any such block: its context says who this thread is, and where `warp_value` and `few_count` lie.
template <int kBlockThreads>
struct alignas(128) RoundBins {
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kBins = 4 * kThreads;
  static constexpr int kLog2Bins = log2_of(kBins);
  static_assert(kBins == kThreads / 32 << kLog2Group);

  uint32_t set[2][kBins + 4];  // used in turn; one more bin counts elements outside the range
  uint32_t group[kThreads / 32];
  BinHit hit;
  // Elements at the boundary, few enough to be compared with each other. Each is a key, followed by the
  // complement of its position.
  alignas(16) uint64_t boundary[kRankDirectly];

  // Clears this thread's bins of one set. All threads have read theirs.
  GVR_DEVICE void clear_set(int which, int thread) {
    reinterpret_cast<uint4*>(set[which])[thread] = make_uint4(0, 0, 0, 0);
  }

  GVR_DEVICE void clear(int thread) {
#pragma unroll
    for (int i = 0; i < 2; ++i) clear_set(i, thread);
    if (thread < kRankDirectly) boundary[thread] = 0;
  }
};

// Finds the bin of the rank-th largest of the elements that all warps have counted in `set`, behind a block
// barrier. `other` is no longer in use, and is cleared if `clear`.
template <typename Context, typename Bins>
GVR_DEVICE BinHit locate(const Context& ctx, Bins& bins, const uint32_t* set, uint32_t* other, bool clear,
                         uint32_t rank) {
  return locate_in_block<4>(set, bins.group, bins.hit, rank, ctx.warp, ctx.lane, [&] {
    if (clear) reinterpret_cast<uint4*>(other)[ctx.thread] = make_uint4(0, 0, 0, 0);
  });
}

template <int kWords>
struct Partition {
  LaneMask<kWords> above, inside;
  uint32_t rank;            // how many elements inside are selected
  uint32_t boundary_count;  // number of elements inside; 0 if none is left to choose

  GVR_DEVICE void take_all() {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      above.word[w] |= inside.word[w];
      inside.word[w] = 0;
    }
    boundary_count = 0;
  }
};

template <typename Tile>
using PartitionOf = Partition<Tile::kWords>;

// Calls visit(there, index, element) for the elements of a set, one of each lane at a time. All lanes take
// part as long as one has elements left, so that none comes apart; `there` says whether this lane has one.
// `element` is the set of this element alone.
template <int kWords, typename Visit>
GVR_DEVICE void for_each_together(LaneMask<kWords> set, Visit visit) {
#pragma unroll 1
  while (__any_sync(0xffffffffu, set.any())) {
    LaneMask<kWords> element;
    uint32_t index = 0;
    bool there = false;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bit = there ? 0 : set.word[w] & -set.word[w];
      element.word[w] = bit;
      set.word[w] ^= bit;
      if (bit != 0) index = w * kValuesPerThread + ((__ffs(bit) - 1) >> 1);
      there |= bit != 0;
    }
    visit(there, index, element);
  }
}

// Moves the selected elements from `inside` to `above`, by comparing all elements inside with each other;
// ties go to the smallest positions. `before` becomes the number that earlier warps have selected, and `kth`
// the k-th key if there are elements inside. `key_of` makes a key of the bits in a tile. This takes one block
// barrier.
template <typename Context, typename Tile, typename Bins, typename KeyOf>
GVR_DEVICE void select_boundary(const Context& ctx, const Tile& tile, Bins& bins,
                                PartitionOf<Tile>& partition, uint32_t& before, uint32_t& kth, KeyOf key_of) {
  auto& smem = *ctx.shared;
  const uint32_t here = __reduce_add_sync(0xffffffffu, partition.above.count());
  if (ctx.lane == 0) smem.warp_value[0][ctx.warp] = here;
  uint32_t first = 0;
  if (__any_sync(0xffffffffu, partition.inside.any())) {  // Few warps have any.
    const uint32_t count = partition.inside.count(), boundary = ptx::shared_address(bins.boundary);
    // Lanes without any add zero elsewhere, because ptxas would branch around an addition under a predicate.
    uint32_t slot = first = atomicAdd(
        count != 0 ? &smem.few_count : &smem.warp_value[1][ctx.lane % (Bins::kThreads / 32)], count);
    for_each_together(partition.inside, [&](bool there, uint32_t index, const auto&) {
      const uint64_t key = key_of(tile.bits_at(index));
      const uint64_t item = key << 32 | ~tile.position(ctx.lane, index);
      ptx::store_shared_if(there && slot < kRankDirectly, boundary + sizeof(item) * slot, item);
      ++slot;
    });
  }
  __syncthreads();
  before = earlier_warps(ctx, 0);
  const uint64_t mine = bins.boundary[ctx.lane];
  float greater = 0.0f;
#pragma unroll 1
  for (uint32_t i = 0; i < partition.boundary_count; i += 4) {  // Absent elements are greater than none.
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::count_if_greater(greater, bins.boundary[i + j], mine);
  }
  const bool there = static_cast<uint32_t>(ctx.lane) < partition.boundary_count;
  const float rank = static_cast<float>(partition.rank);
  const uint32_t taken = __ballot_sync(0xffffffffu, there && greater < rank);
  const bool earlier = ~static_cast<int32_t>(mine) < tile.begin;
  before += __popc(__ballot_sync(0xffffffffu, there && greater < rank && earlier));
  const uint32_t last = __ballot_sync(0xffffffffu, there && greater == rank - 1.0f);
  if (last != 0) kth = __shfl_sync(0xffffffffu, static_cast<uint32_t>(mine >> 32), __ffs(last) - 1);
  for_each_together(partition.inside, [&](bool there, uint32_t, const auto& element) {
    const bool is_taken = taken >> first & 1;
    first += there;
#pragma unroll
    for (int w = 0; w < Tile::kWords; ++w) partition.above.word[w] |= is_taken ? element.word[w] : 0;
  });
}

// As `select_boundary`, for many elements inside, all of them equal: the first `rank` in index order are
// selected.
template <typename Context, typename Tile>
GVR_DEVICE void select_ties(const Context& ctx, const Tile& tile, PartitionOf<Tile>& partition,
                            uint32_t& before) {
  auto& smem = *ctx.shared;
  const uint32_t above = __reduce_add_sync(0xffffffffu, partition.above.count());
  const uint32_t tied = __reduce_add_sync(0xffffffffu, partition.inside.count());
  if (ctx.lane == 0) smem.warp_value[1][ctx.warp] = above | tied << 16;
  __syncthreads();
  const uint32_t packed = earlier_warps(ctx, 1);
  const uint32_t ties_before = min(packed >> 16, partition.rank);
  before = (packed & 0xffffu) + ties_before;
  const uint32_t left = partition.rank - ties_before;
  tile.for_each_in_order_of(partition.inside, ctx.lane, [&](bool there, int word, int bit, uint32_t rank) {
    partition.above.word[word] |= static_cast<uint32_t>(there && rank < left) << 2 * bit;
  });
}

// Moves the selected elements from `inside` to `above`. `tied`: the elements inside are equal, and too many
// to be compared with each other.
template <typename Context, typename Tile, typename Bins, typename KeyOf>
GVR_DEVICE void select_inside(const Context& ctx, const Tile& tile, Bins& bins, PartitionOf<Tile>& partition,
                              bool tied, uint32_t& before, uint32_t& kth, KeyOf key_of) {
  if (tied) {
    select_ties(ctx, tile, partition, before);
  } else {
    select_boundary(ctx, tile, bins, partition, before, kth, key_of);
  }
}

}  // namespace gvr_topk::small_row
