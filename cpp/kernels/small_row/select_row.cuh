// Selects the top k of a row that one CTA holds in registers, once the row has arrived: the phases from
// verify on.
//
// The kernel of short rows runs it, and so does the first CTA of a cluster whose row is much shorter than its
// buffer (small_row/solo_row.cuh).
#pragma once

#include "cluster/row_job.cuh"
#include "core/row_report.cuh"
#include "small_row/key_rounds.cuh"
#include "small_row/partition.cuh"
#include "small_row/value_window.cuh"

namespace gvr_topk::small_row {

struct alignas(128) SelectShared {
  RoundBins<kThreads> bins;
  uint4 last_vec;  // the last vector of a row's buffer, if it is not whole (small_row/cta_tile.cuh)
  // [k] selected positions, in ascending order. Positions of a short row fit 16 bits.
  alignas(8) uint16_t staged[1];
};

inline constexpr size_t select_bytes(int k) { return sizeof(SelectShared) + sizeof(uint16_t) * k; }

// `job` belongs to a cluster of one CTA, and its row has arrived in `tile`. The bins are cleared.
// `last_window` is the first number of the row's state. The thread whose `next` is not null stores the state
// for the next step there.
template <bool kOptions, typename T, int kValues>
GVR_DEVICE void select_row(const TopkParams& p, const LaunchTraits& traits, const RowJob<T, kOptions>& job,
                           CtaTile<T, kValues>& tile, SelectShared& own, const OutputWriter& output,
                           float last_window, StepState* next) {
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  PartitionOf<CtaTile<T, kValues>> partition;
  const HintReason reason = job.hint_reason(p, traits, is_window(last_window));
  const bool guessed = reason == HintReason::kUsed;
  uint32_t kth = 0;
  // Refines, collects, emits, and says how the k-th was found. It is inlined twice, so that the common case
  // has no jumps.
  const auto select_and_emit = [&](auto key_of, bool tied, bool window_hit, int rounds) {
    uint32_t before = 0;
    select_inside(ctx, tile, own.bins, partition, tied, before, kth, key_of);
    int items = ctx.k;
    // A window holds only finite values. The key that radix rounds have found is not above the k-th key.
    if (kOptions && traits.has(LaunchTraits::kDropMasked) && !window_hit && kth <= kNegInfKey) {
      items = drop_masked(ctx, tile, partition.above, before);
    }
    job.count_hint_hits(p, traits, kth);
    stage_selected(ctx, tile, partition.above, before, own.staged);
    __syncthreads();
    if (items == ctx.k) {
      write_staged(ctx, traits, own.staged, output);
    } else {
#pragma unroll 1
      for (int i = ctx.thread; i < items; i += kThreads) output.put(i, own.staged[i]);
    }
    job.finish_dropped(p, traits, output, items);
    if (ctx.thread != 0 || !traits.has(LaunchTraits::kStats)) return;
    write_stats(stats_of(p, traits, job.row), reason, 1, static_cast<int>(partition.boundary_count), rounds,
                job.hint(p, traits).indices != nullptr ? static_cast<int>(smem.hint_hits) : -1,
                guessed ? kGuessValue : kGuessNone, window_hit, rounds - guessed);
  };
  // Verify, by the window of the last step.
  if (guessed && try_predicted_window(ctx, tile, own.bins, last_window, next, partition)) {
    if (partition.rank == partition.boundary_count && !traits.has(LaunchTraits::kStats))
      partition.take_all();  // Nobody needs the k-th key itself.
    select_and_emit([](uint32_t bits) { return order_key(__uint_as_float(bits)); }, false, true, guessed);
    return;
  }
  // Verify, by radix rounds.
  tile.make_keys(ctx.row.lead, ctx.lane);
  int rounds = guessed;
  kth = partition_by_keys(ctx, tile, own.bins, rounds, next, partition);
  select_and_emit([](uint32_t bits) { return whole_key<T>(bits); }, partition.boundary_count > kRankDirectly,
                  false, rounds);
}

}  // namespace gvr_topk::small_row
