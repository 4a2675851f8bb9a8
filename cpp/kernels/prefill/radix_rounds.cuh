// Radix rounds over a whole row. They select from rows whose guesses have all missed, for any content and any
// k.
#pragma once

#include "core/part_stream.cuh"
#include "core/prefill_rows.cuh"
#include "prefill/guess.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::prefill {

// Each warp streams its own part of a row, through the memory of its ring.
template <typename T>
using RowStream = PartStream<T, kBlockWarps, kPrefillRingDepth>;

// Counts the elements above and equal to a key in each warp's part. Returns whether the key is the k-th.
template <typename T, typename Shared>
GVR_DEVICE bool verify_key(Shared& smem, const RowStream<T>& stream, uint32_t key, int k, int warp) {
  const IntervalTest test(KeyInterval::only(key));
  uint32_t above = 0, ties = 0;
  stream.start();
  stream.for_each_tile([&](int, uint32_t slot, uint32_t valid) {
    uint32_t above_bits;
    ties += __popc(test.not_below(stream.ring, slot, valid, above_bits));
    above += __popc(above_bits);
  });
  ptx::reconverge(ptx::unknown_zero());
  above = __reduce_add_sync(0xffffffffu, above);
  ties = __reduce_add_sync(0xffffffffu, ties) - above;
  const int lane = stream.lane;
  __syncthreads();
  if (lane == 0) {
    smem.warp_sums[0][warp] = above;
    smem.warp_sums[1][warp] = ties;
  }
  ptx::reconverge(ptx::unknown_zero());
  __syncthreads();
  const uint32_t all_above = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.warp_sums[0][lane] : 0);
  const uint32_t all_ties = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.warp_sums[1][lane] : 0);
  return static_cast<uint32_t>(k) - all_above - 1 < all_ties;
}

// Elements above the k-th key and equal to it that come before those of a window.
struct EarlierItems {
  uint32_t above, ties;
};

// Calls put(item, position) for the elements above the k-th key and the first of its ties, k in all with
// those before the window. `verify_key` has counted both.
template <typename T, typename Shared, typename Put>
GVR_DEVICE void emit_by_key(const Shared& smem, const RowStream<T>& stream, uint32_t key, int k,
                            const EarlierItems& earlier, int warp, Put put) {
  const int lane = stream.lane;
  const uint32_t above = lane < kBlockWarps ? smem.warp_sums[0][lane] : 0;
  const uint32_t ties = lane < kBlockWarps ? smem.warp_sums[1][lane] : 0;
  OutputCursor cursor{0, k - earlier.above - __reduce_add_sync(0xffffffffu, above)};
  cursor.advance(earlier.above + __reduce_add_sync(0xffffffffu, lane < warp ? above : 0),
                 earlier.ties + __reduce_add_sync(0xffffffffu, lane < warp ? ties : 0));
  stream.start();
  emit_part(stream, key, false, cursor, put);
}

// The least selected key, and how many elements of this key are selected.
struct KthKey {
  uint32_t key, quota;

  // Selects everything.
  GVR_DEVICE static KthKey none() { return KthKey{kAbsentKey, 0}; }
};

// Finds the k-th key of at least k keys if it lies in `range`. for_each(visit) calls visit(key) for this
// thread's share of them. If it lies above or below, `smem.hits[0].count` is 0, and the result says nothing.
template <typename T, typename Shared, typename ForEach>
GVR_DEVICE KthKey find_kth(Shared& smem, int k, KeyRange range, int& rounds, ForEach for_each) {
  const uint32_t rank = static_cast<uint32_t>(k);
  uint32_t quota = 0;
#pragma unroll 1
  while (range.length != 0) {
    const int shift = range.shift<kLog2KeyBins>();
    clear_key_bins(smem);
    RadixBins bins{smem.key_bins, range, shift};
    for_each([&](uint32_t key) { bins.add(key >> kInvariantBits<T>); });
    locate_ranks(smem, bins.above, RankPair{rank, rank});
    quota = rank - smem.hits[0].above;
    range.narrow(smem.hits[0].bin, shift);
    ++rounds;
  }
  return KthKey{whole_key<T>(range.base), quota};
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
  const int k = p.k;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const RowStream<T> stream(AlignedWindow<T>(p, row).view(), smem.ring, warp, lane);
  uint32_t key = tried;
  int rounds = 0;
  if (tried == kAbsentKey || !verify_key<T>(smem, stream, tried, k, warp)) {
    constexpr KeyRange kEvery{0, kMaxKey >> kInvariantBits<T>};
    const KthKey kth = find_kth<T>(smem, k, kEvery, rounds, [&](auto visit) {
      stream.start();
      stream.for_each_key(visit);
    });
    key = kth.key;
    verify_key<T>(smem, stream, key, k, warp);
  }
  const PrefillOutput output(p, row);
  emit_by_key<T>(smem, stream, key, k, EarlierItems{0, 0}, warp,
                 [&](uint32_t item, int position) { output.put(static_cast<int>(item), position); });
  const uint32_t ties = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.warp_sums[1][lane] : 0);
  const bool tied = ties > kMostTies || key < kLeastFiniteKey || key > kMostFiniteKey;
  return RadixOutcome{tied ? key : kAbsentKey, rounds};
}

}  // namespace gvr_topk::prefill
