// Selects the top k of many short rows, each a window of its own into the scores: the rows of a prefill
// chunk.
//
// Grid: as many CTAs of 512 threads as the GPU runs at once, or one for each row. Each CTA takes runs of
// neighbouring rows, one row after the other, and holds the row in registers.
//
// Phases, of each row, are those of the kernel of short rows (small_row/kernel.cuh):
// - guess: the row before has left a window of values around its k-th value;
// - verify: one round of even bins over that window, or else radix rounds over the keys, find the k-th;
// - refine: the few elements in its bin are compared with each other;
// - collect: selected positions are staged, in ascending order;
// - emit: they are written, several at a time.
//
// The next row is on its way to shared memory meanwhile (prefill_short/window_tile.cuh).
#pragma once

#include "core/launch.cuh"
#include "core/smem_layout.cuh"
#include "prefill/output.cuh"
#include "prefill/predictor.cuh"
#include "prefill/window.cuh"
#include "prefill_short/window_tile.cuh"
#include "small_row/key_rounds.cuh"
#include "small_row/partition.cuh"
#include "small_row/value_window.cuh"

namespace gvr_topk::prefill_short {

using prefill::PrefillOutput;
using prefill::RowReport;
using prefill::Schedule;
using prefill::Window;
using prefill::WindowLoad;
using small_row::RoundBins;
using small_row::ValueWindow;

// Windows are published two rows ahead of the row that is selected from. Warps that still emit a row read its
// window while others are one row further on, where a row may have a single block barrier, behind what it
// publishes. So a window stays until that barrier has been passed, and there is a place more.
constexpr int kWindowsAhead = 2;
constexpr int kWindows = kWindowsAhead + 2;
static_assert((kWindows & (kWindows - 1)) == 0);

// CTAs that share an SM where a thread holds up to 16 elements. Consumer Blackwell has shared memory for one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kCtasPerSm = 1;
#else
constexpr int kCtasPerSm = 2;
#endif

struct alignas(128) RowsShared {
  Shared shared;
  RoundBins bins;
  Window windows[kWindows];
  Schedule schedule;
  uint64_t barriers[2];  // of the places where windows arrive
  float value_window;    // what a row leaves for the next one: see ValueWindow
  // [min(k, width)] selected positions, in ascending order. Positions of a short row fit 16 bits. Behind them
  // lies the place where the next row arrives.
  alignas(16) uint16_t staged[8];
};
static_assert(sizeof(RowsShared) <= kShortPrefillFixedBytes);

// Bytes of the staged positions, in whole vectors.
__host__ __device__ inline int staged_bytes(const PrefillParams& p) {
  return (min(p.k, p.width) * static_cast<int>(sizeof(uint16_t)) + 15) / 16 * 16;
}

// Writes the positions that all warps have staged.
__device__ __forceinline__ void write_staged(const uint16_t* staged, const PrefillOutput& output, int k) {
  if (output.takes_vectors(k)) {
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < k; i += 4 * kThreads) {
      const ushort4 four = *reinterpret_cast<const ushort4*>(staged + i);
      *reinterpret_cast<int4*>(output.writer.indices + i) = make_int4(four.x, four.y, four.z, four.w);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += kThreads) output.put(i, staged[i]);
  }
}

// Clears this thread's bins of a round that has been looked at.
__device__ __forceinline__ void clear_bins(RoundBins& bins, int round, int thread) {
  reinterpret_cast<uint4*>(bins.set[round & 1])[thread] = make_uint4(0, 0, 0, 0);
}

// Selects from a row that is longer than k and lies in registers: stages its positions. `publish` is called
// ahead of the last block barrier.
template <typename T, typename WindowTile, typename Publish>
__device__ __forceinline__ void select_row(const PrefillParams& p, RowsShared& sm, const RowContext<T>& ctx,
                                           WindowTile& tile, int32_t* stats, Publish publish) {
  small_row::PartitionOf<WindowTile> split;
  const float last = sm.value_window;
  const bool guessed = p.predicts && ValueWindow::is_known(last);
  float* const next = ctx.thread == kThreads - 32 ? &sm.value_window : nullptr;
  uint32_t kth = 0, before = 0;
  int rounds = guessed;
  const bool hit = guessed && small_row::try_predicted_window(ctx, tile, sm.bins, last, next, split);
  uint32_t candidates = split.boundary_count;
  if (hit) {
    clear_bins(sm.bins, 0, ctx.thread);
    if (split.rank == split.boundary_count) split.take_all();
    small_row::select_boundary(ctx, tile, sm.bins, split, before, kth,
                               [](uint32_t bits) { return order_key(__uint_as_float(bits)); });
  } else {
    tile.make_keys(ctx.lane);
    uint32_t dense_bin = 0;
    const small_row::RankedRange range = small_row::narrow_keys(ctx, tile, sm.bins, rounds, dense_bin);
    clear_bins(sm.bins, rounds - 1, ctx.thread);
    split = small_row::split_at(tile, range);
    candidates = split.boundary_count;
    const bool tied = split.boundary_count > kRankDirectly;
    if (next != nullptr) *next = small_row::window_around<T>(range.keys.base, dense_bin, tied);
    if (tied) {
      small_row::select_ties(ctx, tile, split, before);
    } else {
      small_row::select_boundary(ctx, tile, sm.bins, split, before, kth,
                                 [](uint32_t bits) { return whole_key<T>(bits); });
    }
  }
  if (stats != nullptr) {
    RowReport report = RowReport::begin(p.predicts, false);
    if (guessed) report.reason = HintReason::kUsed, report.source = kGuessValue;
    report.passes = 1;
    report.candidates = candidates;
    report.guess_hit = hit;
    report.rounds = rounds - guessed;
    report.write(stats);
  }
  small_row::stage_selected(ctx, tile, split.above, before, sm.staged);
  publish();
  __syncthreads();
  // Its readers stand before that barrier, and the next ones behind others.
  if (ctx.thread < kRankDirectly) sm.bins.boundary[ctx.thread] = 0;
  if (ctx.thread == 0) ctx.shared->small_count = 0;
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads, kValues <= kValuesPerThread ? kCtasPerSm : 1)
    prefill_short_topk(const __grid_constant__ PrefillParams p) {
  using WindowTile = WindowTile<T, kValues>;
  using Arrivals = Arrivals<T, kValues>;
  RowsShared& sm = *reinterpret_cast<RowsShared*>(storage);
  RowContext<T> ctx{};
  ctx.k = p.k;
  ctx.ctas = 1;
  ctx.thread = threadIdx.x, ctx.lane = threadIdx.x & 31, ctx.warp = threadIdx.x >> 5;
  // The unknown zero keeps the compiler from adding over the warp before an addition to shared memory: few
  // lanes add to one address here, and that would take longer.
  ctx.shared = &reinterpret_cast<RowsShared*>(storage + ptx::unknown_zero())->shared;
  ptx::grid_take_over();
  if (ctx.thread == 0) {
    sm.schedule.start_run(p, 0);
    for (int i = 0; i < kWindowsAhead; ++i) {
      sm.windows[i] = WindowLoad(p, sm.schedule.next(p)).window(p);
    }
    sm.value_window = kStateUnknown;
    ctx.shared->small_count = 0;
  }
  sm.bins.clear(ctx.thread);
  Arrivals arrivals(ptx::shared_address(sm.staged) + staged_bytes(p), sm.barriers);
  __syncthreads();
  const auto fetch = [&](const Window& window, uint32_t number) {
    if (window.row >= 0 && window.n > p.k) {
      arrivals.fetch(AlignedWindow<T>(p, window), number, ctx.warp, ctx.lane);
    }
    ptx::commit_copies();
  };
  fetch(sm.windows[0], 0);
#pragma unroll 1
  for (int turn = 0;;) {
    const Window& row = sm.windows[turn];
    if (row.row < 0) return;
    const int after = (turn + 1) % kWindows;
    const auto publish = [&] {
      // The window that it replaces is that of two rows ago.
      if (ctx.thread == 0) {
        sm.windows[(turn + kWindowsAhead) % kWindows] = WindowLoad(p, sm.schedule.next(p)).window(p);
      }
    };
    int32_t* const stats =
        ctx.thread == 0 && p.stats != nullptr ? p.stats + int64_t{row.row} * kStatColumns : nullptr;
    if (ctx.thread == 0 && p.counts != nullptr) p.counts[row.row] = min(row.n, p.k);
    if (row.n <= p.k) {
      fetch(sm.windows[after], arrivals.taken);
      write_short(PrefillOutput(p, row), row.n, p.k, kThreads);
      if (stats != nullptr) RowReport::begin(p.predicts, true).write(stats);
      publish();
      __syncthreads();
    } else {
      const auto fetch_next = [&] { fetch(sm.windows[after], arrivals.taken + 1); };
      if (Arrivals::kPlaces == 2) fetch_next();
      arrivals.wait();
      WindowTile tile;
      tile.take(AlignedWindow<T>(p, row), arrivals.place(arrivals.taken), ctx.warp, ctx.lane);
      ptx::fence_before_bulk_copies();
      if (Arrivals::kPlaces == 1) {
        __syncthreads();  // All warps have taken the row.
        fetch_next();
      }
      ++arrivals.taken;
      ctx.row.n = row.n;
      select_row(p, sm, ctx, tile, stats, publish);
      write_staged(sm.staged, PrefillOutput(p, row), p.k);
    }
    turn = after;
  }
}

}  // namespace gvr_topk::prefill_short
