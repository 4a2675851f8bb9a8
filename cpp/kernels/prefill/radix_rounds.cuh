// Radix rounds over a whole row. They select from rows whose guesses have all missed, for any content and any
// k.
#pragma once

#include "core/lane_ranks.cuh"
#include "core/prefill_rows.cuh"
#include "prefill/guess.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::prefill {

// One warp's part of a row. The tiles of a part are neighbours, so the order of the warps is index order.
template <typename T>
struct RowPart {
  int begin, end;

  GVR_DEVICE RowPart(const AlignedWindow<T>& window, int warp) {
    const int tiles = (window.length + kTileElements - 1) / kTileElements;
    const int part = (tiles + kBlockWarps - 1) / kBlockWarps * kTileElements;
    begin = min(warp * part, window.length);
    end = min(begin + part, window.length);
  }
};

// Calls visit(tile, begin, bits) for each tile of this warp's part, loaded straight from global memory.
// `bits` marks the lane's elements that lie in the window.
template <typename T, typename Visit>
GVR_DEVICE void for_each_tile(const AlignedWindow<T>& window, int warp, int lane, Visit visit) {
  const RowPart<T> part(window, warp);
#pragma unroll 1
  for (int begin = part.begin; begin < part.end; begin += kTileElements) {
    Tile<T> tile;
    load_tile(window.view(), begin, part.end, lane, tile);
    ptx::reconverge(ptx::unknown_zero());  // Some lanes have loaded single elements.
    uint32_t bits = valid_bits<T>(begin, part.end, lane);
    if (begin == 0 && lane == 0) bits &= ~((1u << window.lead) - 1);
    visit(tile, begin, bits);
  }
}

template <typename T, typename Test>
GVR_DEVICE uint32_t matching(const Tile<T>& tile, uint32_t bits, Test test) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kValuesPerThread; ++i) {
    if (test(order_key(tile.value(i)))) found |= 1u << i;
  }
  return found & bits;
}

// Counts the elements above and equal to a key in each warp's part. Returns whether the key is the k-th.
template <typename T, typename Shared>
GVR_DEVICE bool verify_key(Shared& smem, const AlignedWindow<T>& window, uint32_t key, int k, int warp,
                           int lane) {
  uint32_t above = 0, ties = 0;
  for_each_tile(window, warp, lane, [&](const Tile<T>& tile, int, uint32_t bits) {
    above += __popc(matching(tile, bits, [&](uint32_t x) { return x > key; }));
    ties += __popc(matching(tile, bits, [&](uint32_t x) { return x == key; }));
  });
  above = __reduce_add_sync(0xffffffffu, above);
  ties = __reduce_add_sync(0xffffffffu, ties);
  __syncthreads();
  if (lane == 0) {
    smem.warp_sums[0][warp] = above;
    smem.warp_sums[1][warp] = ties;
  }
  __syncthreads();
  const uint32_t all_above = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.warp_sums[0][lane] : 0);
  const uint32_t all_ties = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.warp_sums[1][lane] : 0);
  return static_cast<uint32_t>(k) - all_above - 1 < all_ties;
}

// Elements above the k-th key and equal to it that come before those of a window.
struct EarlierItems {
  uint32_t above, ties;
};

// Calls put(tile, bit, item, position) for the elements above the k-th key and the first of its ties, k in
// all with those before the window. `verify_key` has counted both.
template <typename T, typename Shared, typename Put>
GVR_DEVICE void emit_by_key(const Shared& smem, const AlignedWindow<T>& window, uint32_t key, int k,
                            const EarlierItems& earlier, int warp, int lane, Put put) {
  const uint32_t above = lane < kBlockWarps ? smem.warp_sums[0][lane] : 0;
  const uint32_t ties = lane < kBlockWarps ? smem.warp_sums[1][lane] : 0;
  const uint32_t quota = k - earlier.above - __reduce_add_sync(0xffffffffu, above);
  const uint32_t earlier_ties =
      min(earlier.ties + __reduce_add_sync(0xffffffffu, lane < warp ? ties : 0), quota);
  uint32_t item = earlier.above + __reduce_add_sync(0xffffffffu, lane < warp ? above : 0) + earlier_ties;
  uint32_t ties_left = quota - earlier_ties;
  for_each_tile(window, warp, lane, [&](const Tile<T>& tile, int begin, uint32_t bits) {
    constexpr int kVecs = Tile<T>::kVecs;
    uint32_t selected = matching(tile, bits, [&](uint32_t x) { return x > key; });
    const uint32_t equal = matching(tile, bits, [&](uint32_t x) { return x == key; });
    const uint32_t found = for_each_in_order<T>(equal, kVecs, lane, [&](int bit, uint32_t rank) {
      if (rank < ties_left) selected |= 1u << bit;
    });
    ties_left -= min(found, ties_left);
    item += for_each_in_order<T>(selected, kVecs, lane, [&](int bit, uint32_t rank) {
      put(tile, bit, static_cast<int>(item + rank), bit_position<T>(begin, bit, lane) - window.lead);
    });
  });
}

// Finds the k-th key of a row.
template <typename T>
GVR_DEVICE uint32_t kth_key(PrefillShared& smem, const AlignedWindow<T>& window, int k, int warp, int lane,
                            int& rounds) {
  KeyRange range{0, kMaxKey >> kInvariantBits<T>};
#pragma unroll 1
  while (range.length != 0) {
    const int shift = range.shift<kLog2KeyBins>();
    clear_key_bins(smem);
    uint32_t above = 0;
    for_each_tile(window, warp, lane, [&](const Tile<T>& tile, int, uint32_t bits) {
#pragma unroll
      for (int i = 0; i < kValuesPerThread; ++i) {
        if ((bits >> i & 1) != 0) {
          above += count_key(smem, range, shift, order_key(tile.value(i)) >> kInvariantBits<T>);
        }
      }
    });
    add_above(smem, above);
    locate_ranks(smem, RankPair{static_cast<uint32_t>(k), static_cast<uint32_t>(k)});
    range.narrow(smem.hits[0].bin, shift);
    ++rounds;
  }
  return whole_key<T>(range.base);
}

// If more elements than this part the k-th key, the next row tries that key first.
constexpr uint32_t kMostTies = 512;

struct RadixOutcome {
  uint32_t tie_key;  // the k-th key if it is not finite or has more than kMostTies ties; otherwise kAbsentKey
  int rounds;
};

// Selects from a row by radix rounds. `tried` is a key to try first, or kAbsentKey: many neighbouring rows
// have the same k-th key.
template <typename T>
__device__ __noinline__ RadixOutcome radix_select_row(const PrefillParams& p, PrefillShared& smem,
                                                      const Window& row, uint32_t tried) {
  const AlignedWindow<T> window(p, row);
  const int k = p.k;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t key = tried;
  int rounds = 0;
  if (tried == kAbsentKey || !verify_key(smem, window, tried, k, warp, lane)) {
    key = kth_key(smem, window, k, warp, lane, rounds);
    verify_key(smem, window, key, k, warp, lane);
  }
  const PrefillOutput output(p, row);
  emit_by_key(smem, window, key, k, EarlierItems{0, 0}, warp, lane,
              [&](const Tile<T>&, int, int item, int position) { output.put(item, position); });
  const uint32_t ties = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.warp_sums[1][lane] : 0);
  const bool tied = ties > kMostTies || key < kLeastFiniteKey || key > kMostFiniteKey;
  return RadixOutcome{tied ? key : kAbsentKey, rounds};
}

}  // namespace gvr_topk::prefill
