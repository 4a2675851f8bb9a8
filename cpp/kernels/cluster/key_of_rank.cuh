// Reductions over a block, and the search for a key by its rank among keys that the block's threads hold
// wherever they like: in registers, in shared memory, or in the row.
#pragma once

#include "cluster/row_context.cuh"
#include "cluster/select.cuh"
#include "core/histogram.cuh"
#include "core/key_range.cuh"
#include "core/lane_ranks.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// A sum over the block, and over its earlier warps.
struct BlockSum {
  uint32_t all, earlier;
};

// Sums up one number of each thread. This takes one block barrier, and another one has passed since `sums`
// were last read.
template <typename Context>
GVR_DEVICE BlockSum block_sum(const Context& ctx, uint32_t (&sums)[kWarps], uint32_t x) {
  ptx::reconverge(ctx.zero);  // Lanes have counted different elements.
  x = __reduce_add_sync(0xffffffffu, x);
  if (ctx.lane == 0) sums[ctx.warp] = x;
  __syncthreads();
  ptx::reconverge(ctx.zero);
  x = ctx.lane < kWarps ? sums[ctx.lane] : 0;
  return BlockSum{__reduce_add_sync(0xffffffffu, x),
                  __reduce_add_sync(0xffffffffu, ctx.lane < ctx.warp ? x : 0)};
}

struct KeyStatistics {
  uint32_t count, least, greatest;
};

// Statistics of the keys over the block; for_each(visit) calls visit(key) for this thread's. This
// takes one block barrier, and another one has passed since the last call.
template <typename Context, typename ForEach>
GVR_DEVICE KeyStatistics key_statistics(const Context& ctx, ForEach for_each) {
  auto& of_warp = ctx.shared->warp_value;
  KeyStatistics keys{0, kMaxKey, kAbsentKey};
  for_each([&](uint32_t x) {
    ++keys.count;
    keys.least = min(keys.least, x);
    keys.greatest = max(keys.greatest, x);
  });
  ptx::reconverge(ctx.zero);  // Lanes have different numbers of keys.
  const uint32_t count = __reduce_add_sync(0xffffffffu, keys.count);
  const uint32_t least = __reduce_min_sync(0xffffffffu, keys.least);
  const uint32_t greatest = __reduce_max_sync(0xffffffffu, keys.greatest);
  if (ctx.lane == 0) {
    of_warp[0][ctx.warp] = count;
    of_warp[1][ctx.warp] = least;
    of_warp[2][ctx.warp] = greatest;
  }
  __syncthreads();
  ptx::reconverge(ctx.zero);
  return KeyStatistics{__reduce_add_sync(0xffffffffu, ctx.lane < kWarps ? of_warp[0][ctx.lane] : 0),
                       __reduce_min_sync(0xffffffffu, of_warp[1][ctx.lane % kWarps]),
                       __reduce_max_sync(0xffffffffu, of_warp[2][ctx.lane % kWarps])};
}

// A key of a given rank, and the scans of all keys that led to it: one for each histogram behind the first,
// and one for each distinct key from the edge of the last histogram's bin on, as if the search had stepped
// from key to key there.
struct KeyOfRank {
  uint32_t key;
  int scans;
};

// Finds the bin that holds the rank-th largest item; for_each(add) calls add(bin) for this thread's items.
// `bins` have one bin more than the histogram, for items that do not count. They are empty before and
// afterwards, each time behind a block barrier. This also clears `few_count`.
template <typename Context, typename Bins, typename ForEach>
GVR_DEVICE BinHit locate_items(const Context& ctx, Bins& bins, uint32_t rank, ForEach for_each) {
  if (ctx.thread == 0) ctx.shared->few_count = 0;
  for_each([&](uint32_t bin) { atomicAdd(&bins.set[0][bin], 1u); });
  __syncthreads();
  ptx::reconverge(ctx.zero);  // Lanes have counted different items.
  const BinHit hit = locate_in_block<Bins::kBins / kThreads>(bins.set[0], bins.group, bins.hit, rank,
                                                             ctx.warp, ctx.lane, [] {});
  bins.clear_set(0, ctx.thread);
  return hit;
}

// The rank-th largest of the first `count` keys in `few_keys`, among which are all keys between it and
// `edge`. `scans` led to the list, which has been made behind a block barrier.
template <typename Context>
GVR_DEVICE KeyOfRank key_in_list(const Context& ctx, int count, uint32_t rank, uint32_t edge, int scans) {
  const uint32_t mine = ctx.lane < count ? ctx.shared->few_keys[ctx.lane] : kAbsentKey;
  const uint32_t key = rank_directly(mine, count, rank, ctx.lane);
  const bool passed = edge < key ? edge < mine && mine <= key : key <= mine && mine < edge;
  const bool is_first = __ffs(__match_any_sync(0xffffffffu, mine)) - 1 == ctx.lane;
  return KeyOfRank{key, scans + 1 + __popc(__ballot_sync(0xffffffffu, passed && is_first))};
}

// The rank-th largest of the keys from `bottom` to `top`, the extremes over all threads, for which
// for_each(visit) calls visit(key), always with the same keys. Bins even in key divide the range until few
// keys are left.
template <typename Context, typename Bins, typename ForEach>
GVR_DEVICE KeyOfRank key_in_range(const Context& ctx, Bins& bins, uint32_t bottom, uint32_t top,
                                  uint32_t rank, ForEach for_each) {
#pragma unroll 1
  for (int scans = 1;; ++scans) {
    KeyRange range{bottom, top - bottom};
    if (range.length == 0) return KeyOfRank{bottom, scans};
    const int shift = range.shift<Bins::kLog2Bins>();
    const BinHit hit = locate_items(ctx, bins, rank, [&](auto add) {
      for_each([&](uint32_t x) { add(range.contains(x) ? range.bin(x, shift) : Bins::kBins); });
    });
    rank -= hit.above;
    range.narrow(hit.bin, shift);
    const auto for_each_inside = [&](auto visit) {
      for_each([&](uint32_t x) {
        if (range.contains(x)) visit(x);
      });
    };
    if (hit.count <= kRankDirectly) {
      for_each_inside([&](uint32_t x) { add_small(*ctx.shared, x); });
      __syncthreads();
      ptx::reconverge(ctx.zero);  // Lanes have added different keys.
      return key_in_list(ctx, static_cast<int>(hit.count), rank, range.base, scans);
    }
    const KeyStatistics inside = key_statistics(ctx, for_each_inside);
    bottom = inside.least, top = inside.greatest;
  }
}

}  // namespace gvr_topk
