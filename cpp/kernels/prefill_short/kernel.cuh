// Selects the top k of every row of a prefill chunk whose rows are short. Each row is a window of its own
// into the scores.
//
// Grid: as many CTAs as the GPU runs at once, or one for each row if there are fewer rows. Each CTA takes
// runs of neighbouring rows, one row after the other. It holds a row in registers, 64 elements of each
// thread, and has 128, 256 or 512 threads: the fewest that hold the buffer's width. A warp has work for each
// row that does not depend on the row's length, so few warps per row do less of it, and several CTAs on an SM
// hide each other's latency.
//
// The phases of each row are those of the kernel of short rows (small_row/kernel.cuh):
// - guess: the previous row has left a window of values around its k-th value;
// - verify: one round of even bins over that window finds the k-th, or else radix rounds over the keys do.
//   Elements are counted in the window's bins as they are taken into registers;
// - refine: the few elements in the bin of the k-th are compared with each other;
// - collect: the selected positions are staged in ascending order;
// - emit: the staged positions are written, several at a time.
//
// Meanwhile the next row is fetched to shared memory (prefill_short/prefill_tile.cuh).
#pragma once

#include "cluster/smem_layout.cuh"
#include "core/launch.cuh"
#include "core/prefill_rows.cuh"
#include "core/row_report.cuh"
#include "prefill_short/prefill_tile.cuh"
#include "ptx/barrier.cuh"
#include "small_row/key_rounds.cuh"
#include "small_row/partition.cuh"
#include "small_row/value_window.cuh"

namespace gvr_topk::prefill_short {

using small_row::RoundBins;

// Windows are published two rows ahead of the row being selected from. Warps that still emit a row read its
// window while other warps are already at the next row. The next row may have a single block barrier, and
// publishes a window before that barrier. So a window must stay until that barrier has been passed, and there
// is room for one more window.
constexpr int kWindowsAhead = 2;
constexpr int kWindows = kWindowsAhead + 2;
static_assert((kWindows & (kWindows - 1)) == 0);

template <int kBlockThreads>
struct alignas(128) RowsShared {
  RoundBins<kBlockThreads> bins;
  uint32_t warp_value[2][kBlockThreads / 32];
  uint32_t few_count;  // elements at the boundary that have been listed
  float value_window;  // the window that a row leaves for the next one (small_row/value_window.cuh)
  Schedule schedule;
  uint64_t barriers[2];  // mbarriers of the buffers where windows arrive
  Window windows[kWindows];
  // [min(k, width)] selected positions, in ascending order. Positions of a short row fit 16 bits. The buffers
  // where rows arrive follow these positions.
  alignas(16) uint16_t staged[8];
};
static_assert(sizeof(RowsShared<128>) <= short_prefill_fixed_bytes(128));
static_assert(sizeof(RowsShared<512>) <= short_prefill_fixed_bytes(512));

// A thread's indices in its block, and the block's shared memory, as the functions of small_row need them.
//
// Warps are numbered so that neighbouring ones share a scheduler (there are four, which take warps in turn):
// neighbouring warps have a word more in turn, and all schedulers then have equal work.
template <typename T, int kBlockThreads>
struct BlockContext {
  using Element = T;
  using Shared = RowsShared<kBlockThreads>;
  static constexpr int kSchedulers = 4;  // of an SM

  uint32_t zero;  // see ptx::unknown_zero
  Shared* shared;
  int k, lane, warp, thread;

  // The unknown zero in the address keeps the compiler from summing over the warp before an atomic addition
  // to shared memory. Few lanes add to one address here, so such a sum would take longer.
  GVR_DEVICE explicit BlockContext(int k_)
      : zero(ptx::unknown_zero()),
        shared(reinterpret_cast<Shared*>(storage + zero)),
        k(k_),
        lane(threadIdx.x & 31),
        warp((threadIdx.x >> 5) % kSchedulers * (kBlockThreads / 32 / kSchedulers) +
             (threadIdx.x >> 5) / kSchedulers),
        thread(32 * warp + lane) {}
};

// Bytes of the staged positions, rounded up to whole 16-byte vectors.
__host__ __device__ inline int staged_bytes(const PrefillParams& p) {
  return (min(p.k, p.width) * static_cast<int>(sizeof(uint16_t)) + 15) / 16 * 16;
}

// Selects from a row that is longer than k and lies in registers, and stages its selected positions. If the
// row is `guessed`, `last` is a window, in whose bins its elements have been counted.
// `publish` is called before the last block barrier.
template <typename T, int kBlockThreads, typename Tile, typename Publish>
GVR_DEVICE void select_row(const PrefillParams& p, RowsShared<kBlockThreads>& smem,
                           const BlockContext<T, kBlockThreads>& ctx, Tile& tile, bool guessed, float last,
                           int32_t* stats, Publish publish) {
  small_row::PartitionOf<Tile> partition;
  float* const next = ctx.thread == kBlockThreads - 32 ? &smem.value_window : nullptr;
  uint32_t kth = 0, before = 0;
  int rounds = 1;
  small_row::ValueWindow<RoundBins<kBlockThreads>::kBins> value_window(last);
  ptx::keep(value_window.scale);  // Bins are computed again: without this the compiler would keep them.
  const bool hit =
      guessed && small_row::partition_by_window(ctx, tile, smem.bins, last, next, partition,
                                                [&](int i) { return value_window.bin(tile.value(i)); });
  uint32_t candidates;
  if (hit) {
    candidates = partition.boundary_count;
    smem.bins.clear_set(0, ctx.thread);
    if (partition.rank == partition.boundary_count) partition.take_all();
    small_row::select_boundary(ctx, tile, smem.bins, partition, before, kth,
                               [](uint32_t bits) { return order_key(__uint_as_float(bits)); });
  } else {
    tile.make_keys(ctx.lane);
    small_row::partition_by_keys(ctx, tile, smem.bins, rounds, next, partition);
    smem.bins.clear_set((rounds - 1) & 1, ctx.thread);
    candidates = partition.boundary_count;
    small_row::select_inside(ctx, tile, smem.bins, partition, candidates > kRankDirectly, before, kth,
                             [](uint32_t bits) { return whole_key<T>(bits); });
  }
  if (p.stats != nullptr) {
    if (stats != nullptr) {
      RowReport report = RowReport::begin(p.predicts, false);
      if (guessed) report.reason = HintReason::kUsed, report.source = kGuessValue;
      report.passes = 1;
      report.candidates = candidates;
      report.guess_hit = hit;
      report.rounds = rounds - 1;
      report.write(stats);
    }
    ptx::reconverge(ctx.zero);
  }
  tile.stage(partition.above, ctx.lane, before, ptx::shared_address(smem.staged));
  publish();
  __syncthreads();
  // All reads of this memory precede that barrier, and its next uses follow further block barriers.
  if (ctx.thread < kRankDirectly) smem.bins.boundary[ctx.thread] = 0;
  if (ctx.thread == 0) ctx.shared->few_count = 0;
}

template <typename T, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads, kThreads / kBlockThreads)
    prefill_short_topk(const __grid_constant__ PrefillParams p) {
  if constexpr (!has_short_prefill(kBlockThreads, sizeof(T), kArch)) {
    __trap();
    return;
  }
  using Arrivals = Arrivals<T, kBlockThreads>;
  RowsShared<kBlockThreads>& smem = *reinterpret_cast<RowsShared<kBlockThreads>*>(storage);
  const BlockContext<T, kBlockThreads> ctx(p.k);
  ptx::grid_take_over();
  if (ctx.thread == 0) {
    smem.schedule.start_run(p, 0);
    for (int i = 0; i < kWindowsAhead; ++i) {
      smem.windows[i] = WindowLoad(p, smem.schedule.next(p)).window(p);
    }
    smem.value_window = kStateUnknown;
    ctx.shared->few_count = 0;
  }
  smem.bins.clear(ctx.thread);
  Arrivals arrivals(ptx::shared_address(smem.staged) + staged_bytes(p), smem.barriers);
  __syncthreads();
  const auto fetch = [&](const Window& window, uint32_t number) {
    if (window.row >= 0 && window.n > p.k) {
      arrivals.fetch(BulkWindow<T>(p, window), number, ctx.warp, ctx.lane);
    }
    ptx::commit_copies();
  };
  fetch(smem.windows[0], 0);
#pragma unroll 1
  for (int turn = 0;;) {
    const Window& row = smem.windows[turn];
    if (row.row < 0) return;
    const int after = (turn + 1) % kWindows;
    const WindowLoad later(p, ctx.thread == 0 ? smem.schedule.next(p) : -1);
    const auto publish = [&] {
      // This replaces the window of two rows ago.
      if (ctx.thread == 0) smem.windows[(turn + kWindowsAhead) % kWindows] = later.window(p);
    };
    int32_t* const stats =
        ctx.thread == 0 && p.stats != nullptr ? p.stats + int64_t{row.row} * kStatColumns : nullptr;
    if (ctx.thread == 0 && p.counts != nullptr) p.counts[row.row] = min(row.n, p.k);
    if (row.n <= p.k) {
      fetch(smem.windows[after], arrivals.taken);
      write_short(PrefillOutput(p, row), row.n, p.k, kBlockThreads);
      if (stats != nullptr) RowReport::begin(p.predicts, true).write(stats);
      publish();
      __syncthreads();
    } else {
      const auto fetch_next = [&] { fetch(smem.windows[after], arrivals.taken + 1); };
      if (Arrivals::kBuffers == 2) fetch_next();
      arrivals.wait();
      const float last = smem.value_window;
      const bool guessed = p.predicts && is_window(last);
      const BulkWindow<T> window(p, row);
      const uint32_t buffer = arrivals.buffer(arrivals.taken);
      PrefillTile<T, kBlockThreads> tile;
      // Elements are counted while later ones are being loaded. If there is no window, nobody looks at the
      // counts, but a second copy of this code would take more registers.
      const small_row::ValueWindowCounter<RoundBins<kBlockThreads>> counter(smem.bins, last);
      tile.take(window, buffer, ctx.warp, ctx.lane, [&](int i) { counter.count(tile.value(i)); });
      ptx::fence_before_bulk_copies();
      __syncthreads();  // All warps have taken the row into registers.
      if (Arrivals::kBuffers == 1) {
        fetch_next();
        // Single lanes fetch, and the code that follows starts with collective operations of each warp.
        ptx::reconverge(ctx.zero);
      }
      ++arrivals.taken;
      select_row(p, smem, ctx, tile, guessed, last, stats, publish);
      write_staged<kBlockThreads>(smem.staged, PrefillOutput(p, row), p.k);
    }
    turn = after;
  }
}

}  // namespace gvr_topk::prefill_short
