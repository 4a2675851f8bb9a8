// Selects the top k of every row of a prefill chunk. Each row is a window of its own into the scores.
//
// Grid: as many CTAs of 256 threads as the GPU runs at once, or one for each row if there are fewer rows.
// Each CTA takes runs of neighbouring rows, one row after the other.
//
// Phases of each row:
// - guess: an interval that should hold the k-th value comes from the rows before, or from a sample of this
//   row where they predict badly (prefill/guess.cuh);
// - collect: warps stream the row, mark the elements above the interval in a bitmap, and list the elements
//   inside as candidates (prefill/chunk_stream.cuh);
// - verify: the counts show whether the k-th element is a candidate, and a histogram finds its bin;
// - refine: the few candidates in that bin are ranked by comparison, and the selected candidates are marked
//   in the bitmap (prefill/select.cuh);
// - emit: the marked positions are staged in ascending order, and then written.
//
// The first tiles of the next row are fetched while this row is refined, and its sample while positions are
// staged. A row whose interval misses the k-th value is streamed again: with an interval from a sample if the
// rows before gave the one that missed, and with one from what was counted if a sample did. If that does not
// tell where to look, or misses too, radix rounds select from the row (prefill/radix_rounds.cuh). They also
// take every row for a large k, and rows too long for the bitmap.
#pragma once

#include "core/launch.cuh"
#include "core/prefill_rows.cuh"
#include "gvr_topk/policy.h"
#include "prefill/chunk_stream.cuh"
#include "prefill/radix_rounds.cuh"
#include "prefill/select.cuh"
#include "ptx/barrier.cuh"

namespace gvr_topk::prefill {

// The bits of a lane's elements, from element `begin` of the window's memory on, that belong to the window.
template <typename T>
GVR_DEVICE uint32_t window_bits(const AlignedWindow<T>& window, int begin) {
  const int before = max(window.lead - begin, 0);
  return ptx::bit_range(before, max(min(window.length - begin, kValuesPerThread) - before, 0));
}

// Collects with an interval: marks the elements above it, and lists the elements inside as candidates, in any
// order.
template <typename T>
GVR_DEVICE void collect(const PrefillParams& p, PrefillShared& smem, ChunkStream<T>& stream,
                        const AlignedWindow<T>& window, const Window& next_window,
                        const ValueInterval& interval, int warp, int lane) {
  constexpr uint32_t kTileBytes = ChunkStream<T>::Ring::kTileBytes;
  const uint32_t zero = ptx::unknown_zero();
  const int pairs = pairs_of_warp(window.length, warp);
  uint16_t* const bitmap = bitmap_of(smem);
  int first = warp * kPairElements + lane * kValuesPerThread;  // this lane's first element of the pair
  uint32_t count = 0;
  stream.for_each_pair(p, pairs, next_window, warp, lane, [&](uint32_t slot) {
    uint32_t above, above_in_second;
    uint32_t listed = stream.ring.not_below(interval.lo, interval.hi, slot, above);
    listed |= stream.ring.not_below(interval.lo, interval.hi, slot + kTileBytes, above_in_second) << 16;
    above |= above_in_second << 16;
    // Elements before the window, and what lies behind the row's end, do not belong to the row.
    if (first < window.lead || first + kTileElements + kValuesPerThread > window.length) {
      const uint32_t bits = window_bits(window, first) | window_bits(window, first + kTileElements) << 16;
      above &= bits;
      listed &= bits;
    }
    bitmap[first / kValuesPerThread] = static_cast<uint16_t>(above);
    bitmap[(first + kTileElements) / kValuesPerThread] = static_cast<uint16_t>(above >> 16);
    count += __popc(above);
    listed &= ~above;
    if (listed != 0) {
      uint32_t at = ptx::fetch_add_shared(smem.listed, __popc(listed), zero);
#pragma unroll 1
      for (; listed != 0 && at < kListItems; listed &= listed - 1, ++at) {
        const int bit = __ffs(listed) - 1, second = bit / kValuesPerThread, index = bit % kValuesPerThread;
        smem.candidates[at] = BufferedValue{first + second * kTileElements + index,
                                            stream.ring.value(slot + second * kTileBytes, index)};
      }
    }
    first += kPairStride;
  });
  ptx::reconverge(zero);
  count = __reduce_add_sync(0xffffffffu, count);
  if (lane == 0) ptx::add_shared(smem.above, count, zero);
}

// Forgets all candidates. Block barriers separate this from the uses before and after.
GVR_DEVICE void reset_candidates(PrefillShared& smem) {
  smem.fine_bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) smem.boundary_count = smem.above = smem.listed = 0;
}

// Loads the sample of a row whose candidates will be collected, unless it is there already.
template <typename T>
GVR_DEVICE void load_sample(const PrefillParams& p, const Window row, RowSample<T>& sample) {
  const AlignedWindow<T> window(p, row);
  if (row.row != sample.row && has_candidates(p, row, window)) sample = RowSample<T>(window, row.row);
}

// Selects from a row that is longer than k.
template <typename T>
GVR_DEVICE void select_row(const PrefillParams& p, PrefillShared& smem, ChunkStream<T>& stream,
                           RowSample<T>& sample, const Window& row, const Window& next_window) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const AlignedWindow<T> window(p, row);
  const bool collects = has_candidates(p, row, window) && smem.predictor.tie_key == kAbsentKey;
  bool by_value = collects && smem.predictor.is_close(), by_sample = collects && !by_value, by_counts = false;
  ValueInterval interval;
#pragma unroll 1
  while (by_value || by_sample || by_counts) {
    if (by_sample) load_sample(p, row, sample);
    // The row's first tiles are fetched while the sample is counted.
    stream.enter(window, warp, lane);
    if (by_value) interval = smem.predictor.interval();
    if (by_sample) interval = guess_by_sample<T>(smem, window, p.k, smem.predictor, sample);
    collect(p, smem, stream, window, next_window, interval, warp, lane);
    __syncthreads();
    const uint32_t above = smem.above, inside = smem.listed, rank = p.k - above;
    const float bins_per_unit = interval.bins_per_unit();
    count_candidates(smem, min(inside, kListItems), interval, bins_per_unit);
    __syncthreads();
    // Verify. Unsigned wrap: `rank - 1 < inside` is false for rank 0 and for negative ranks.
    const bool complete = inside <= kListItems && rank - 1 < inside;
    if (threadIdx.x == 0) smem.report.count_pass(by_value, inside, complete);
    ptx::reconverge(ptx::unknown_zero());
    if (complete) {
      const BinHit hit = locate_fine(smem, rank, lane);
      if (threadIdx.x == 0) {
        smem.predictor.learn(interval.value_of(hit.bin), __fdividef(interval.width(), inside), p.k);
      }
      ptx::reconverge(ptx::unknown_zero());
      uint32_t* const bitmap = reinterpret_cast<uint32_t*>(bitmap_of(smem));
      refine(smem, bitmap, inside, window.length, interval, bins_per_unit, hit, rank - hit.above, lane, warp);
      __syncthreads();
      reset_candidates(smem);
      if (!smem.predictor.is_close()) load_sample(p, next_window, sample);
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
  smem.predictor = RowPredictor::tied(outcome.tie_key);
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
  RowSample<T> sample;
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
      select_row(p, smem, stream, sample, row, smem.windows[after]);
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
