// Radix rounds over a short row of which nothing is known: 9 to 11 bits of the key per round, by the size of
// the block, out of the registers.
//
// Additions of one in shared memory cost next to nothing even when all meet in one bin. So every element is
// counted, those outside the range in a bin of their own, and nothing branches. Two rounds usually leave the
// k-th key alone. The same code handles ties, infinities and NaN: the time hardly depends on what the row
// holds.
#pragma once

#include "core/key_range.cuh"
#include "ptx/warp.cuh"
#include "small_row/partition.cuh"
#include "small_row/value_window.cuh"

namespace gvr_topk::small_row {

// A range that holds the k-th key, which is the `rank`-th largest of the range's `count` elements.
struct RankedRange {
  KeyRange keys;
  uint32_t rank, count;

  // Returns whether the range has one key, or all of its elements are selected, so that its lower end serves
  // as the k-th key.
  GVR_DEVICE bool is_done() const { return keys.length == 0 || rank == count; }
};

template <typename T, typename Bins>
constexpr int kFirstShift = 32 - kInvariantBits<T> - Bins::kLog2Bins;

// Narrows the range of the k-th key until it `is_done`, or holds few elements, or fewer than `others` that
// are not selected. The parity of `rounds` names the set of bins for the first round, which is clear. The
// other set is clear if `rounds` is zero; otherwise the first round clears it. `dense_bin` becomes the number
// of elements in the first round's bin.
template <typename Context, typename Tile, typename Bins>
GVR_DEVICE RankedRange narrow_keys(const Context& ctx, const Tile& tile, Bins& bins, int& rounds,
                                   uint32_t& dense_bin, uint32_t others = 0) {
  using T = typename Context::Element;
  constexpr int kBins = Bins::kBins;
  RankedRange range{{0, kMaxKey >> kInvariantBits<T>}, static_cast<uint32_t>(ctx.k), kMaxKey};
  int shift = kFirstShift<T, Bins>;
  bool first = true;
  // Counts into the bins of the range. Keys are shifted before the subtraction, because the range starts at a
  // multiple of its length. Everything outside falls into the bin behind the last.
  const auto count = [&](uint32_t* set, uint32_t low, uint32_t outside) {
    tile.for_each_index([&](int i) { atomicAdd(&set[min((tile.bits[i] >> shift) - low, outside)], 1u); });
    __syncthreads();
  };
  // The longest rows count inside the loop, or their registers would be spilled.
  constexpr bool kBeforeLoop = Tile::kSize <= kWideValuesPerThread;
  if constexpr (kBeforeLoop) count(bins.set[rounds & 1], 0, kBins);
#pragma unroll 1
  while (true) {
    if (!kBeforeLoop && first) count(bins.set[rounds & 1], 0, kBins);
    uint32_t* const other = bins.set[~rounds & 1];
    const BinHit hit = locate(ctx, bins, bins.set[rounds & 1], other, rounds > 0, range.rank);
    ++rounds;
    range.keys.narrow(hit.bin, shift);
    range.rank -= hit.above;
    range.count = hit.count;
    if (first) dense_bin = hit.count;
    const bool is_narrow = range.count <= kRankDirectly || range.count - range.rank < others;
    // All lanes agree. A vote shows it to the compiler, which would otherwise guard all that follows.
    if (__any_sync(0xffffffffu, range.is_done() || is_narrow)) return range;
    first = false;
    shift = range.keys.template shift<Bins::kLog2Bins>();
    const uint32_t outside = (range.keys.length >> shift) + 1;
    count(other, range.keys.base >> shift, outside);
    if (outside < kBins) range.rank += other[outside];
  }
}

template <typename Tile>
GVR_DEVICE PartitionOf<Tile> partition_at(const Tile& tile, const RankedRange& range) {
  PartitionOf<Tile> partition;
  const bool takes_all = range.rank == range.count;
  // A range that is taken whole has a base above zero, because more than k elements lie in the row.
  const uint32_t limit = takes_all ? range.keys.base - 1 : range.keys.base + range.keys.length;
  partition.rank = range.rank;
  partition.boundary_count = takes_all ? 0 : range.count;
  partition.above =
      tile.mask_of([&](float& sum, uint32_t x, float bit) { ptx::set_bit_if_greater(sum, x, limit, bit); });
  if (!takes_all) {
    partition.inside = tile.mask_of([&](float& sum, uint32_t x, float bit) {
      ptx::set_bit_if_at_most(sum, x - range.keys.base, range.keys.length, bit);
    });
  }
  return partition;
}

// Returns the window for the next step, so wide that about four elements share a bin. There is none around a
// value that many elements have.
template <typename T, typename Bins>
GVR_DEVICE float window_around(uint32_t base, uint32_t dense_bin, bool tied) {
  constexpr int kShift = kFirstShift<T, Bins>;
  const uint32_t low = base >> kShift << kShift;
  const uint32_t high = low | ((1u << kShift) - 1);
  const float span = key_to_float(whole_key<T>(high)) - key_to_float(whole_key<T>(low));
  const float radius = __fdividef(static_cast<float>(2 * Bins::kBins) * span, static_cast<float>(dense_bin));
  return ValueWindow<Bins::kBins>::around(key_to_float(whole_key<T>(base)), tied ? 0.0f : radius);
}

// Partitions a row by radix rounds over its keys, which the tile holds. The thread whose `next` is not null
// stores the window for the next step there. Returns a key that all elements above the boundary exceed, and
// that is the k-th key if all elements inside are equal.
template <typename Context, typename Tile, typename Bins, typename Next>
GVR_DEVICE uint32_t partition_by_keys(const Context& ctx, const Tile& tile, Bins& bins, int& rounds,
                                      Next* next, PartitionOf<Tile>& partition) {
  using T = typename Context::Element;
  uint32_t dense_bin = 0;
  const RankedRange range = narrow_keys(ctx, tile, bins, rounds, dense_bin);
  partition = partition_at(tile, range);
  if (__any_sync(0xffffffffu, next != nullptr)) {  // All lanes of a warp compute, so that none comes apart.
    const bool tied = partition.boundary_count > kRankDirectly;
    store_window(next, window_around<T, Bins>(range.keys.base, dense_bin, tied));
  }
  return whole_key<T>(range.keys.base);
}

}  // namespace gvr_topk::small_row
