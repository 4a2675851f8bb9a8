// Selects the top k of rows of a prefill chunk whose scores come in slices of their columns, one launch for
// each slice. What is best so far of each row lies in its carry (`CarryRow`).
//
// Grid: two CTAs of 256 threads for each SM, or one for each row if there are fewer rows. Each CTA takes runs
// of neighbouring rows, one row after the other.
//
// Phases of each row:
// - guess: a key that the k-th of carry and slice is not expected to be below. The k-th key of a full carry
//   is certain. Otherwise, and where many elements of the row before lay above that key, a sample of the
//   slice gives one, unless the slice is so short that all of it can be listed;
// - list: warps stream the slice, and list the elements above the key;
// - merge: the k-th key of the carry and the list is found, and what is selected goes to the carry, or to the
//   output where the row ends (prefill_slice/merge.cuh).
//
// A warp that has listed its part fetches its first tiles of the next row. Where CTAs have several rows, half
// of them start a little later, so that some read while others merge. If the list has no room for all
// elements, the slice is streamed again with a key from a sample. If that fails too, radix rounds take the
// carry and the whole slice, as they do for a large k.
#pragma once

#include "core/launch.cuh"
#include "gvr_topk/policy.h"
#include "prefill_slice/merge.cuh"
#include "ptx/barrier.cuh"

namespace gvr_topk::prefill_slice {

// The numbers that make up a `Slice`, loaded here and first used by `slice`, so that other work can run while
// they are being loaded.
struct SliceLoad {
  WindowLoad window;
  uint64_t head;

  // `row` is negative after the last row.
  GVR_DEVICE SliceLoad(const SliceParams& p, int32_t row) : window(p.prefill, row), head(0) {
    if (row >= 0) head = p.carry[row * (int64_t{p.prefill.k} + 1)];
  }

  GVR_DEVICE Slice slice(const SliceParams& p) const {
    WindowLoad moved = window;
    if (moved.row >= 0) {
      moved.start = max(window.start, 0) - p.column;
      moved.end = max(window.end, 0) - p.column;
    }
    Slice made{moved.window(p.prefill), 0, 0, kAbsentKey};
    // A padding row has nothing in its carry either.
    if (window.row < 0 ||
        static_cast<uint32_t>(window.request) >= static_cast<uint32_t>(p.prefill.requests)) {
      return made;
    }
    made.shift = max(-moved.start, 0);
    made.carried = static_cast<int32_t>(min(static_cast<uint32_t>(head), static_cast<uint32_t>(p.prefill.k)));
    if (made.carried == p.prefill.k) made.kth_key = static_cast<uint32_t>(head >> 32);
    return made;
  }
};

// Whether the slice is streamed: nothing lies above a NaN.
GVR_DEVICE bool is_streamed(const SliceParams& p, const Slice& slice) {
  return p.prefill.lists && slice.window.row >= 0 && slice.window.n > 0 && slice.kth_key != kMaxKey;
}

template <typename T>
GVR_DEVICE RowStream<T> stream_of(const SliceParams& p, SliceShared& smem, const Slice& slice) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  return RowStream<T>(AlignedWindow<T>(p.prefill, slice.window).view(), smem.ring, warp, lane);
}

// Fetches the first tiles of a slice.
template <typename T>
__device__ __noinline__ void start_stream(const SliceParams& p, int turn) {
  SliceShared& smem = shared_memory();
  stream_of<T>(p, smem, smem.slices[turn]).start();
}

// Lists the elements above a key. Each warp, whose ring is its own, then fetches its first tiles of the slice
// number `next`, unless that is negative. Block barriers separate this from the uses before and after of the
// counts, and of the bins, which are emptied for the merge.
template <typename T>
__device__ __noinline__ void list_above(const SliceParams& p, int turn, int next, uint32_t key) {
  SliceShared& smem = shared_memory();
  const Slice& slice = smem.slices[turn];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const RowStream<T> stream = stream_of<T>(p, smem, slice);
  SliceStore store = store_of_warp(smem, p.list_chunks, warp);
  store.claim_part(lane);
  prefill::empty_key_bins(smem);
  if (threadIdx.x == 0) smem.few_count = 0;
  const float bound = KeyInterval::only(key).high();
  const int first = slice.shift + stream.first_position() + kValuesPerThread * lane;
  stream.for_each_pair([&](int step, uint32_t slot, uint32_t bits, uint32_t bits_of_second) {
    constexpr uint32_t kTileBytes = RowStream<T>::Ring::kTileBytes;
    uint32_t above, second;
    stream.ring.not_below(INFINITY, bound, slot, above);  // The compiler removes the other bits.
    stream.ring.not_below(INFINITY, bound, slot + kTileBytes, second);
    store.append_pair(&smem.chunks_used, above & bits, second & bits_of_second, lane,
                      [&](int number, int at) {
                        const int tile = number / kValuesPerThread, index = number % kValuesPerThread;
                        store.store[at] = BufferedValue{first + (step + tile) * kTileElements + index,
                                                        stream.ring.value(slot + tile * kTileBytes, index)};
                      });
  });
  if (next >= 0) start_stream<T>(p, next);
  if (lane == 0) {
    smem.stored[warp] = store.count;
    if (store.full) smem.is_full = 1;
  }
  ptx::reconverge(ptx::unknown_zero());
}

// Forgets all listed elements. Block barriers separate this from the uses before and after.
GVR_DEVICE void reset_list(const SliceParams& p, SliceShared& smem) {
  if (threadIdx.x != 0) return;
  smem.is_full = 0;
  smem.chunks_used = kBlockWarps * SliceStore::initial_chunks(p.list_chunks);
}

// A key that about k elements of the slice and some more lie above.
template <typename T>
__device__ __noinline__ uint32_t guess_key(const SliceParams& p, int turn) {
  SliceShared& smem = shared_memory();
  const AlignedWindow<T> window(p.prefill, smem.slices[turn].window);
  prefill::RowSample<T> sample(window, smem.slices[turn].window.row);
  const ValueInterval interval =
      prefill::guess_by_sample<T>(smem, window, p.prefill.k, RowPredictor::unknown(), sample);
  return order_key(interval.lo) - 1;
}

enum class Merge { kDone, kNoRoom, kMissed };

// Merges with the listed elements, which are all that lie above `key`. Merges nothing if the list had no room
// for all, or if the k-th key of a sample's list may lie among those that were not listed. It begins with the
// block barrier behind the list.
template <typename T>
__device__ __noinline__ Merge merge_listed(const SliceParams& p, int turn, uint32_t key) {
  SliceShared& smem = shared_memory();
  const Slice& slice = smem.slices[turn];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, k = p.prefill.k;
  // Read once, before a pair is written: pairs move to other places.
  const CarriedPairs pairs(CarryRow(p, slice).word + 1, slice.carried, warp, lane);
  __syncthreads();
  if (smem.is_full != 0) return Merge::kNoRoom;
  const uint32_t stored = lane < kBlockWarps ? smem.stored[lane] : 0;
  const uint32_t listed = __reduce_add_sync(0xffffffffu, stored);
  // A sum, so that the compiler knows that all lanes have it.
  const uint32_t own = __reduce_add_sync(0xffffffffu, lane == warp ? stored : 0);
  if (listed == 0 && !p.ends && key == slice.kth_key) return Merge::kDone;
  const ListedItems items(store_of_warp(smem, p.list_chunks, warp), static_cast<int>(own), lane);
  const int total = slice.carried + static_cast<int>(listed), count = min(total, k);
  const auto for_each_carried = [&](auto visit) { pairs.for_each(visit); };
  const auto for_each_listed = [&](auto visit) { items.for_each(visit); };
  KthKey kth = KthKey::none();
  if (total >= k && listed > 0) {
    kth = find_kth_listed<T>(smem, k, key, lane, [&](auto visit) {
      for_each_carried([&](uint32_t x, int) { visit(x); });
      for_each_listed([&](uint32_t x, int) { visit(x); });
    });
  }
  if (key != slice.kth_key && kth.key <= key) return Merge::kMissed;
  const uint32_t of_carry = count_selected(kth, for_each_carried);
  const uint32_t of_list = count_selected(kth, for_each_listed);
  if (lane == 0) {
    smem.warp_sums[0][warp] = of_carry;
    smem.warp_sums[1][warp] = of_list;
  }
  __syncthreads();
  const ListSink sink(p, slice);
  const EarlierItems carried =
      put_selected(kth, EarlierItems{0, 0}, smem.warp_sums[0], warp, lane, for_each_carried, sink);
  put_selected(kth, carried, smem.warp_sums[1], warp, lane, for_each_listed, sink);
  if (p.ends) {
    auto* const staged = reinterpret_cast<int32_t*>(smem.key_bins);
    for (int i = count + static_cast<int>(threadIdx.x); i < k; i += kBlockThreads) staged[i] = -1;
    ptx::reconverge(ptx::unknown_zero());
    __syncthreads();
    write_staged<kBlockThreads>(staged, PrefillOutput(p.prefill, slice.window), k);
  }
  finish(p, slice, count, kth.key);
  return Merge::kDone;
}

// Rows of one length end together on all SMs, and nobody would read while all CTAs merge. So half of the CTAs
// start later, by half of the time that a row takes, and at most by the longest delay that was tried.
template <typename T>
GVR_DEVICE void stagger(const SliceParams& p, const Slice& first) {
  constexpr uint32_t kBytesPerNs = 36;  // of an SM on an H200, whose 132 share 4.8 TB/s
  constexpr uint32_t kMostNs = 20'000;
  const bool is_late = blockIdx.x >= gridDim.x / 2 && static_cast<uint32_t>(p.prefill.rows) >= 2 * gridDim.x;
  if (is_small_arch(kArch) || !is_late) return;
  __nanosleep(min(static_cast<uint32_t>(first.window.n) * sizeof(T) / kBytesPerNs, size_t{kMostNs}));
}

// What is kept from row to row, the same in all threads.
struct Progress {
  bool is_started = false;  // whether the first tiles of the row are in flight
  bool overflowed = false;  // whether the row before had too many elements above the k-th key of its carry
};

// Merges a row's slice into its carry, and starts to stream the next row. publish() stores a later slice,
// which all threads see behind this.
template <typename T, typename Publish>
GVR_DEVICE void merge_slice(const SliceParams& p, SliceShared& smem, int turn, int next, Progress& progress,
                            Publish publish) {
  const Slice& slice = smem.slices[turn];
  const int k = p.prefill.k;
  bool merges = true;
  if (is_streamed(p, slice)) {
    // So many elements fit the list wherever they lie: each warp leaves less than two chunks unused.
    const bool fits = slice.window.n <= kChunk * (p.list_chunks - 2 * kBlockWarps);
    bool samples = !fits && (slice.carried < k || progress.overflowed);
    progress.overflowed = false;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (!progress.is_started) start_stream<T>(p, turn);
      const uint32_t key = samples ? max(guess_key<T>(p, turn), slice.kth_key) : slice.kth_key;
      progress.overflowed |= slice.carried == k && key != slice.kth_key;
      progress.is_started = is_streamed(p, smem.slices[next]);
      list_above<T>(p, turn, progress.is_started ? next : -1, key);
      if (pass == 0) publish();
      const Merge merge = merge_listed<T>(p, turn, key);
      merges = merge != Merge::kDone;
      if (merge != Merge::kNoRoom) break;
      progress.overflowed |= slice.carried == k;
      if (samples) break;
      samples = true;
      if (progress.is_started) ptx::wait_copies<0>();  // The slice is streamed through the same memory again.
      progress.is_started = false;
      __syncthreads();  // All warps know that the list is full.
      reset_list(p, smem);
      __syncthreads();
    }
  } else {
    publish();
    merges = slice.window.n > 0 && slice.kth_key != kMaxKey;
    if (!merges && p.ends) {
      put_carried(p, turn, KthKey::none());
      finish_put(p, turn, slice.carried, kAbsentKey);
    }
  }
  if (merges) {
    if (progress.is_started) ptx::wait_copies<0>();  // The rounds stream through the same memory.
    progress.is_started = false;
    merge_by_rounds<T>(p, turn);
  }
  reset_list(p, smem);
  __syncthreads();  // All warps have used this row's shared memory.
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads, is_small_arch(kArch) ? 1 : kPrefillCtasPerSm)
    prefill_slice_topk(const __grid_constant__ SliceParams p) {
  SliceShared& smem = shared_memory();
  const int thread = threadIdx.x;
  ptx::grid_take_over();
  if (thread == 0) {
    smem.schedule.start_run(p.prefill, 0);
    for (int i = 0; i < kWindowsAhead; ++i) {
      smem.slices[i] = SliceLoad(p, smem.schedule.next(p.prefill)).slice(p);
    }
  }
  reset_list(p, smem);
  Progress progress;
  __syncthreads();
  stagger<T>(p, smem.slices[0]);
#pragma unroll 1
  for (int turn = 0;;) {
    if (smem.slices[turn].window.row < 0) return;
    const int after = turn == kWindowsAhead ? 0 : turn + 1;
    const SliceLoad later(p, thread == 0 ? smem.schedule.next(p.prefill) : -1);
    ptx::reconverge(ptx::unknown_zero());
    merge_slice<T>(p, smem, turn, after, progress, [&] {
      // This takes the place of the slice of the row before.
      if (thread == 0) smem.slices[after == kWindowsAhead ? 0 : after + 1] = later.slice(p);
      ptx::reconverge(ptx::unknown_zero());
    });
    turn = after;
  }
}

}  // namespace gvr_topk::prefill_slice
