// Selects the top k of short rows: one CTA holds the row in registers, and needs no other CTA and no hint.
//
// Grid: one CTA of 512 threads per row.
//
// Phases:
// - guess: the state that the last step left is a window of values around its k-th value;
// - verify: one round of even bins over that window leaves the k-th value alone with a few others
//   (small_row/value_window.cuh). Without a window, or where it misses, radix rounds over the keys find the
//   k-th (small_row/key_rounds.cuh);
// - refine: those few are compared with each other (small_row/partition.cuh);
// - collect: selected positions are staged in shared memory, in ascending order
//   (small_row/register_tile.cuh);
// - emit: they are written, several at a time.
#pragma once

#include "core/phase_clock.cuh"
#include "core/row_job.cuh"
#include "small_row/key_rounds.cuh"
#include "small_row/partition.cuh"
#include "small_row/value_window.cuh"

namespace gvr_topk::small_row {

struct alignas(128) SmallRowShared {
  Shared shared;
  RoundBins bins;
  // [min(k, width)] selected positions, in ascending order. Positions of a short row fit 16 bits.
  alignas(8) uint16_t staged[1];
};

inline size_t small_row_bytes(int k) { return sizeof(SmallRowShared) + sizeof(uint16_t) * k; }

template <typename T, int kValues, Specialization kSpecialization>
__global__ void __launch_bounds__(kThreads, kValues < kValuesPerThread ? 2 : 1)
    small_row_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ TopkParams p) {
  using Tile = RegisterTile<T, kValues>;
  constexpr bool kOptions =
      kSpecialization == Specialization::kGeneric || kSpecialization == Specialization::kPrefill;
  const LaunchTraits traits = launch_traits.for_one_cta<kSpecialization>();
  SmallRowShared& own = *reinterpret_cast<SmallRowShared*>(storage);
  ptx::grid_take_over();
  // The unknown zero keeps the compiler from adding over the warp before an addition to shared memory: few
  // lanes add to one address here, and that would take longer.
  RowJob<T, kOptions> job(p, traits, SmemLayout{}, storage + ptx::unknown_zero(), true);
  const RowContext<T>& ctx = job.ctx;
  Shared& sm = *ctx.shared;
  Tile tile;
  if constexpr (Tile::kLoadsEarly) tile.load(ctx.row, traits.has(LaunchTraits::kWholeVectors));
  __syncwarp();  // The loads of the row are issued first.
  StepState early_state = job.load_state_early(p, traits);
  job.load_state_late(p, traits, early_state);
  PhaseClock clock(p.phase_clocks, blockIdx.x, job.writer);
  clock.stamp();
  own.bins.clear(ctx.thread);
  // The parameters of the output are fetched here, while there is time.
  OutputWriter output = job.output(p, traits);
  output.keep(traits);
  if (ctx.thread == 0) sm.at_or_above = sm.small_count = 0;
  job.publish_state(p, traits, early_state);
  float* next = nullptr;  // A window is the first number of a state.
  if (job.is_least_busy()) {
    if (StepState* const state = job.next_state_slot(p, traits, output)) next = &state->z_score;
  }
  ptx::keep(next);
  job.agree_on_length(p, traits);
  if (job.is_short()) {
    job.write_short(p, traits);
    return;
  }
  if constexpr (!Tile::kLoadsEarly) tile.load(ctx.row, false);
  tile.wait(ctx.row.n, ctx.lane);
  clock.stamp();

  PartitionOf<Tile> split;
  const float last_window = traits.has(LaunchTraits::kReadsState) ? sm.facts.state.z_score : kStateUnknown;
  const HintReason reason = job.hint_reason(p, traits, ValueWindow::is_known(last_window));
  const bool guessed = reason == HintReason::kUsed;
  uint32_t kth = 0;
  // Refines, collects, emits, and says how the k-th was found. It is inlined twice, so that the common case
  // has no jumps.
  const auto select_and_emit = [&](auto key_of, bool tied, bool window_hit, int rounds) {
    uint32_t before = 0;
    if (tied) {
      select_ties(ctx, tile, split, before);
    } else {
      select_boundary(ctx, tile, own.bins, split, before, kth, key_of);
    }
    int items = ctx.k;
    // A window holds finite values alone. What radix rounds have found is not above the k-th key.
    if (kOptions && traits.has(LaunchTraits::kDropMasked) && !window_hit && kth <= kNegInfKey) {
      items = drop_masked(ctx, tile, split.above, before);
    }
    job.count_hint_hits(p, traits, kth);
    clock.stamp();
    stage_selected(ctx, tile, split.above, before, own.staged);
    __syncthreads();
    if (items == ctx.k) {
      write_staged(ctx, traits, own.staged, output);
    } else {
#pragma unroll 1
      for (int i = ctx.thread; i < items; i += kThreads) output.put(i, own.staged[i]);
    }
    job.finish_dropped(p, traits, output, items);
    clock.stamp();
    if (ctx.thread != 0 || !traits.has(LaunchTraits::kStats)) return;
    write_stats(stats_of(p, traits, job.row), reason, 1, static_cast<int>(split.boundary_count), rounds,
                job.hint(p, traits).prior != nullptr ? static_cast<int>(sm.at_or_above) : -1,
                guessed ? kGuessValue : kGuessNone, window_hit, rounds - guessed);
  };
  // Verify, by the window of the last step.
  if (guessed && try_predicted_window(ctx, tile, own.bins, last_window, next, split)) {
    if (split.rank == split.boundary_count && !traits.has(LaunchTraits::kStats))
      split.take_all();  // Nobody needs the k-th key itself.
    clock.stamp();
    select_and_emit([](uint32_t bits) { return order_key(__uint_as_float(bits)); }, false, true, guessed);
    return;
  }
  // Verify, by radix rounds.
  tile.make_keys();
  int rounds = guessed;
  uint32_t dense_bin = 0;
  const RankedRange range = narrow_keys(ctx, tile, own.bins, rounds, dense_bin);
  split = split_at(tile, range);
  kth = whole_key<T>(range.keys.base);
  clock.stamp();
  const bool tied = split.boundary_count > kRankDirectly;
  if (next != nullptr) *next = window_around<T>(range.keys.base, dense_bin, tied);
  select_and_emit([](uint32_t bits) { return whole_key<T>(bits); }, tied, false, rounds);
}

}  // namespace gvr_topk::small_row
