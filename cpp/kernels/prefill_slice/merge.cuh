// Merges a row's carry with the elements of a slice: finds the k-th key of both together, and puts what is
// selected into the carry or, at the end of the row, into the output. All pairs of the carry come before the
// slice in position order.
#pragma once

#include "prefill/radix_rounds.cuh"
#include "prefill_slice/config.cuh"

namespace gvr_topk::prefill_slice {

using prefill::EarlierItems;
using prefill::KthKey;

// A row of the carry: a word that says how it begins, and pairs of a key and a position. Any content is safe:
// it decides neither control flow, beside the `Slice` that one thread has read, nor an address.
struct CarryRow {
  static constexpr int kAtOnce = 4;

  uint64_t* word;
  int count;

  GVR_DEVICE CarryRow(const SliceParams& p, const Slice& slice)
      : word(p.carry + slice.window.row * (int64_t{p.prefill.k} + 1)), count(slice.carried) {}

  GVR_DEVICE static uint32_t key(uint64_t pair) { return static_cast<uint32_t>(pair >> 32); }
  GVR_DEVICE static int position(uint64_t pair) { return static_cast<int>(pair); }

  GVR_DEVICE uint64_t pair(int i) const { return i < count ? word[1 + i] : 0; }

  // Calls visit(key) for this thread's share of the pairs.
  template <typename Visit>
  GVR_DEVICE void for_each_key(Visit visit) const {
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += kAtOnce * kBlockThreads) {
      uint64_t some[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) some[j] = pair(first + j * kBlockThreads);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * kBlockThreads < count) visit(key(some[j]));
      }
    }
  }
};

// Puts a selected item into the carry, or into the output if the slice ends the rows. Like the output's
// writer it writes only the row's own k items. It is out of line because a thread puts few items.
static __device__ __noinline__ void put(const SliceParams& p, int turn, uint32_t item, uint32_t key,
                                        int position) {
  const Slice& slice = shared_memory().slices[turn];
  if (p.ends) {
    PrefillOutput(p.prefill, slice.window).put(static_cast<int>(item), position);
  } else if (item < static_cast<uint32_t>(p.prefill.k)) {
    CarryRow(p, slice).word[1 + item] = uint64_t{key} << 32 | static_cast<uint32_t>(position);
  }
}

// Ends the merge of a row that has `count` items now.
static __device__ __noinline__ void finish(const SliceParams& p, int turn, int count, uint32_t kth_key) {
  const Slice& slice = shared_memory().slices[turn];
  const int k = p.prefill.k;
  if (p.ends) {
    const PrefillOutput output(p.prefill, slice.window);
#pragma unroll 1
    for (int i = count + static_cast<int>(threadIdx.x); i < k; i += kBlockThreads) output.put(i, -1);
  }
  if (threadIdx.x != 0) return;
  if (p.prefill.counts != nullptr) p.prefill.counts[slice.window.row] = count;
  const uint32_t key = count == k ? kth_key : kAbsentKey;
  CarryRow(p, slice).word[0] = p.ends ? 0 : uint64_t{key} << 32 | static_cast<uint32_t>(count);
}

// Finds the k-th key of the carry and the slice. `for_each_of_slice(visit)` calls visit(key) for this
// thread's share of the slice's elements. Together there are at least k.
template <typename T, typename ForEach>
GVR_DEVICE KthKey find_kth(SliceShared& smem, const CarryRow& carry, int k, ForEach for_each_of_slice) {
  int rounds = 0;
  return prefill::find_kth<T>(smem, k, rounds, [&](auto visit) {
    carry.for_each_key(visit);
    ptx::reconverge(ptx::unknown_zero());  // Threads have different numbers of pairs.
    for_each_of_slice(visit);
  });
}

// Puts the selected pairs of the carry, in their order. Pairs move towards the front of the carry, and each
// step of the loop reads all of its pairs before it writes one. Returns what all pairs are.
static __device__ __noinline__ EarlierItems put_carried(const SliceParams& p, int turn, KthKey kth) {
  SliceShared& smem = shared_memory();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const CarryRow carry(p, smem.slices[turn]);
  constexpr int kPairs = 8;
  constexpr uint32_t kTie = 1 << 16;  // Two counts of at most kPairs * kBlockThreads share a word.
  static_assert(kPairs * kBlockThreads < kTie);
  EarlierItems before{0, 0};
#pragma unroll 1
  for (int begin = 0; begin < carry.count; begin += kPairs * kBlockThreads) {
    const int first = begin + kPairs * static_cast<int>(threadIdx.x);
    uint64_t pair[kPairs];
    uint32_t counts = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pair[i] = carry.pair(first + i);
    const auto is_above = [&](int i) { return first + i < carry.count && CarryRow::key(pair[i]) > kth.key; };
    const auto is_tie = [&](int i) { return first + i < carry.count && CarryRow::key(pair[i]) == kth.key; };
#pragma unroll
    for (int i = 0; i < kPairs; ++i) counts += is_above(i) ? 1 : is_tie(i) ? kTie : 0;
    const uint32_t upto = ptx::inclusive_scan(counts);
    if (lane == 31) smem.carry_sums[warp] = upto;
    __syncthreads();
    const uint32_t sums = lane < kBlockWarps ? smem.carry_sums[lane] : 0;
    const uint32_t earlier = __reduce_add_sync(0xffffffffu, lane < warp ? sums : 0) + upto - counts;
    const uint32_t all = __reduce_add_sync(0xffffffffu, sums);
    uint32_t above = before.above + earlier % kTie, ties = before.ties + earlier / kTie;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const bool tie = is_tie(i);
      if (is_above(i) || (tie && ties < kth.quota)) {
        put(p, turn, above + min(ties, kth.quota), CarryRow::key(pair[i]), CarryRow::position(pair[i]));
      }
      above += is_above(i);
      ties += tie;
    }
    before.above += all % kTie;
    before.ties += all / kTie;
    __syncthreads();  // All warps have read the sums.
  }
  return before;
}

// Puts the selected ones of the listed elements, behind those of the carry.
GVR_DEVICE void put_listed(const SliceParams& p, int turn, SliceShared& smem, const SliceStore& store,
                           const KthKey& kth, EarlierItems before, int warp, int lane) {
  uint32_t above = 0, ties = 0;
  store.for_each(lane, 0, BufferedValue{-1, 0.0f}, [&](const BufferedValue& x) {
    if (x.position < 0) return;
    above += order_key(x.value) > kth.key;
    ties += order_key(x.value) == kth.key;
  });
  ptx::reconverge(ptx::unknown_zero());
  above = __reduce_add_sync(0xffffffffu, above);
  ties = __reduce_add_sync(0xffffffffu, ties);
  if (lane == 0) {
    smem.warp_sums[0][warp] = above;
    smem.warp_sums[1][warp] = ties;
  }
  __syncthreads();
  before.above += __reduce_add_sync(0xffffffffu, lane < warp ? smem.warp_sums[0][lane] : 0);
  before.ties += __reduce_add_sync(0xffffffffu, lane < warp ? smem.warp_sums[1][lane] : 0);
  OutputCursor cursor{0, kth.quota};
  cursor.advance(before.above, before.ties);
#pragma unroll 1
  for (int first = 0; first < store.count; first += 32) {
    ptx::reconverge(ptx::unknown_zero());
    const bool there = first + lane < store.count;
    const BufferedValue x = there ? store.at(first + lane) : BufferedValue{-1, 0.0f};
    const uint32_t key = order_key(x.value);
    cursor.put_lanes(there && key > kth.key, there && key == kth.key, lane,
                     [&](uint32_t item) { put(p, turn, item, key, x.position); });
  }
}

// Merges with all elements of the slice by radix rounds, for any content and any k.
template <typename T>
__device__ __noinline__ void merge_by_rounds(const SliceParams& p, int turn) {
  SliceShared& smem = shared_memory();
  const Slice& slice = smem.slices[turn];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, k = p.prefill.k;
  const RowView<T> row = AlignedWindow<T>(p.prefill, slice.window).view();
  const SliceStream<T> stream(row, smem.ring, warp, lane);
  const CarryRow carry(p, slice);
  const int64_t total = int64_t{carry.count} + slice.window.n;
  KthKey kth = KthKey::none();
  if (total >= k) {
    kth = find_kth<T>(smem, carry, k, [&](auto visit) {
      stream.start();
      stream.for_each_key(visit);
    });
  }
  const EarlierItems carried = put_carried(p, turn, kth);
  prefill::verify_key<T>(smem, stream, kth.key, k, warp);
  prefill::emit_by_key<T>(smem, stream, kth.key, k, carried, warp, [&](uint32_t item, int position) {
    put(p, turn, item, row.key(position), slice.shift + position);
  });
  ptx::reconverge(ptx::unknown_zero());
  finish(p, turn, static_cast<int>(min(total, int64_t{k})), kth.key);
}

}  // namespace gvr_topk::prefill_slice
