// Selects the top k of every row of a prefill chunk. Each row is a window of its own into the scores.
//
// Grid: as many CTAs of 256 threads as the GPU runs at once, or one for each row if there are fewer rows.
// Each CTA takes runs of neighbouring rows, one row after the other.
//
// Phases of each row:
// - guess: an interval that should hold the k-th value comes from the previous row, or from a sample of this
//   row where the previous row predicts badly (prefill/guess.cuh);
// - collect: warps stream the row, mark the elements above the interval in a bitmap, and store the elements
//   inside as candidates (prefill/chunk_stream.cuh);
// - verify: the counts show whether the k-th element is a candidate, and a histogram finds its bin;
// - refine: the few candidates in that bin are ranked by comparison, and the selected candidates are marked
//   in the bitmap (prefill/select.cuh);
// - emit: the marked positions are staged in ascending order, and then written.
//
// The first tiles of the next row are fetched while this row is refined. A row whose interval misses the k-th
// value is streamed again: with an interval from a sample if the previous row gave the one that missed, and
// with one from what was counted if a sample did. If that misses too, radix rounds select from the row
// (prefill/radix_rounds.cuh). They also take every row for a large k, and rows too long for the bitmap.
#pragma once

#include "core/launch.cuh"
#include "core/prefill_rows.cuh"
#include "gvr_topk/policy.h"
#include "prefill/chunk_stream.cuh"
#include "prefill/radix_rounds.cuh"
#include "prefill/select.cuh"
#include "ptx/barrier.cuh"

namespace gvr_topk::prefill {

// Collects with an interval: marks the elements above it, and stores the elements inside as candidates.
template <typename T>
GVR_DEVICE void collect(const PrefillParams& p, PrefillShared& smem, ChunkStream<T>& stream,
                        const AlignedWindow<T>& window, const Window& next_window,
                        const ValueInterval& interval, CandidateStore& store, int warp, int lane) {
  uint32_t number = 32 * warp + lane;  // index of this lane's half-word: its 16 elements of the tile
  uint32_t count = 0;
  uint16_t* const bitmap = bitmap_of(smem);
  const int tiles = tiles_of_warp(window.length, warp);
  stream.for_each_tile(p, tiles, next_window, warp, lane, [&](uint32_t slot) {
    uint32_t above = 0;
    uint32_t inside = stream.ring.not_below(interval.lo, interval.hi, slot, above) & ~above;
    // Elements before the window, and what lies behind the row's end, do not belong to the row.
    const int first = static_cast<int>(kValuesPerThread * number);
    if (first < window.lead || first + kValuesPerThread > window.length) {
      const int before = max(window.lead - first, 0);
      const uint32_t bits = ptx::bit_range(before, max(window.length - first - before, 0));
      above &= bits;
      inside &= bits;
    }
    bitmap[number] = static_cast<uint16_t>(above);
    count += __popc(above);
    store.append(&smem.chunks_used, inside, lane, [&](int index, int at) {
      smem.candidates[at] =
          BufferedValue{static_cast<int>(kValuesPerThread * number) + index, stream.ring.value(slot, index)};
    });
    number += 32 * kBlockWarps;
  });
  count = __reduce_add_sync(0xffffffffu, count);
  if (lane != 0) return;
  smem.above[warp] = count;
  smem.stored[warp] = store.count + store.lost;
  if (store.full) smem.is_full = 1;
}

// Forgets all candidates. Block barriers separate this from the uses before and after.
GVR_DEVICE void reset_candidates(PrefillShared& smem) {
  smem.fine_bins[threadIdx.x] = 0;
  if (threadIdx.x != 0) return;
  smem.boundary_count = smem.is_full = 0;
  smem.chunks_used = kBlockWarps * CandidateStore::initial_chunks(kStoreChunks);
}

// Selects from a row that is longer than k.
template <typename T>
GVR_DEVICE void select_row(const PrefillParams& p, PrefillShared& smem, ChunkStream<T>& stream,
                           const Window& row, const Window& next_window) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const AlignedWindow<T> window(p, row);
  const bool fits = has_room(p, window);
  bool by_value = fits && smem.predictor.is_close();
  bool by_sample = fits && !by_value && smem.predictor.tie_key == kAbsentKey, by_counts = false;
  ValueInterval interval;
  float per_element = 0.0f;  // interval width that held one element
#pragma unroll 1
  while (by_value || by_sample || by_counts) {
    // The row's first tiles are fetched while the row is sampled.
    const auto enter = [&] { stream.enter(window, warp, lane); };
    if (by_sample) {
      interval = guess_by_sample<T>(smem, window, p.k, smem.predictor, enter);
    } else {
      enter();
      if (by_value) interval = smem.predictor.interval();
    }
    const float bins_per_unit = interval.bins_per_unit();
    CandidateStore store(smem.candidates, smem.chunks[warp], kStoreChunks, warp);
    store.claim_part(lane);
    collect(p, smem, stream, window, next_window, interval, store, warp, lane);
    count_candidates(smem, store, interval, bins_per_unit, lane);
    __syncthreads();
    // Verify.
    const uint32_t above = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.above[lane] : 0);
    const uint32_t inside = __reduce_add_sync(0xffffffffu, lane < kBlockWarps ? smem.stored[lane] : 0);
    const uint32_t rank = p.k - above;
    // Unsigned wrap: `rank - 1 < inside` is false for rank 0 and for negative ranks.
    const bool complete = smem.is_full == 0 && rank - 1 < inside;
    // A moved interval may have elements behind its last bin.
    if (!by_counts) per_element = __fdividef(interval.width(), fmaxf(static_cast<float>(inside), 1.0f));
    if (threadIdx.x == 0) smem.report.count_pass(by_value, inside, complete);
    ptx::reconverge(ptx::unknown_zero());
    if (complete) {
      const BinHit hit = locate_fine(smem, rank, lane);
      uint32_t* const bitmap = reinterpret_cast<uint32_t*>(bitmap_of(smem));
      const float kth =
          refine(smem, bitmap, store, interval, bins_per_unit, hit, rank - hit.above, lane, warp);
      __syncthreads();
      reset_candidates(smem);
      if (threadIdx.x == 0) {
        smem.predictor.learn(kth, per_element, p.k);
      }
      ptx::reconverge(ptx::unknown_zero());
      stage(smem, bitmap, window.length, window.lead, p.k, lane, warp);
      write_staged<kBlockThreads>(smem.staged, PrefillOutput(p, row), p.k);
      return;
    }
    by_counts = by_sample && move_value_interval(interval, above, inside, p.k);
    by_sample = by_value;
    by_value = false;
    __syncthreads();  // All threads have read the counts.
    reset_candidates(smem);
    stream.restart();
    __syncthreads();
  }
  stream.restart();  // The rounds stream the row through the same memory.
  const RadixOutcome outcome = radix_select_row<T>(p, smem, row, smem.predictor.tie_key);
  if (threadIdx.x != 0) return;
  smem.predictor = RowPredictor::unknown();
  smem.predictor.tie_key = outcome.tie_key;
  smem.report.rounds = outcome.rounds;
  ++smem.report.passes;
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads, kPrefillCtasPerSm)
    prefill_topk(const __grid_constant__ PrefillParams p) {
  PrefillShared& smem = *reinterpret_cast<PrefillShared*>(storage);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  ptx::grid_take_over();
  if (thread == 0) {
    smem.schedule.start_run(p, 0);
    for (int i = 0; i < kWindowsAhead; ++i) {
      smem.windows[i] = WindowLoad(p, smem.schedule.next(p)).window(p);
    }
    smem.predictor = RowPredictor::unknown();
  }
  reset_candidates(smem);
  ChunkStream<T> stream(smem.ring, warp, lane);
  __syncthreads();
#pragma unroll 1
  for (int turn = 0;;) {
    const Window& row = smem.windows[turn];
    if (row.row < 0) return;
    const int after = turn == kWindowsAhead ? 0 : turn + 1;
    const WindowLoad later(p, thread == 0 ? smem.schedule.next(p) : -1);
    const bool is_short = row.n <= p.k;
    if (thread == 0) smem.report = RowReport::begin(p.predicts, is_short);
    ptx::reconverge(ptx::unknown_zero());
    if (is_short) {
      write_short(PrefillOutput(p, row), row.n, p.k, kBlockThreads);
    } else {
      select_row(p, smem, stream, row, smem.windows[after]);
    }
    if (thread == 0) {
      if (p.counts != nullptr) p.counts[row.row] = min(row.n, p.k);
      if (p.stats != nullptr) smem.report.write(p.stats + int64_t{row.row} * kStatColumns);
      // This replaces the window of the previous row, whose last readers stand before a block barrier.
      smem.windows[after == kWindowsAhead ? 0 : after + 1] = later.window(p);
    }
    __syncthreads();  // All warps have emitted.
    turn = after;
  }
}

}  // namespace gvr_topk::prefill
