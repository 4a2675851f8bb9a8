// Short rows: one CTA holds the row in registers, and needs no other CTA, nor the hint.
//
// What the last step has left names a window of values, of which one round of even bins leaves the k-th alone
// with a few others (window.cuh). Without, or where it misses, rounds over the keys find it (rounds.cuh).
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
  // [min(k, width)] selected positions, in ascending order; those of a short row fit 16 bits.
  alignas(8) uint16_t staged[1];
};

inline size_t small_row_bytes(int k) { return sizeof(SmallRowShared) + sizeof(uint16_t) * k; }

// None: there is time to wait for the slot while the row comes, and many rows would ask for the same lines.
constexpr int kSlotsLoadedEarly = 0;

template <typename T, int kValues, Specialization kSpecialization>
__global__ void __launch_bounds__(kThreads, kValues < kValuesPerThread ? 2 : 1)
    small_row_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ TopkParams p,
                   const Path path) {
  using Tile = RegisterTile<T, kValues>;
  const LaunchTraits traits = launch_traits.for_one_cta<kSpecialization>();
  SmallRowShared& own = *reinterpret_cast<SmallRowShared*>(storage);
  ptx::grid_take_over();
  // What lanes add to one address the compiler would first add up over the warp. Few do here, and that takes
  // longer.
  RowJob<T> job(p, traits, SmemLayout{}, storage + ptx::unknown_zero(), true);
  const RowContext<T>& ctx = job.ctx;
  Shared& sm = *ctx.shared;
  Tile tile;
  if constexpr (Tile::kLoadsEarly) tile.load(ctx.row, traits.has(LaunchTraits::kWholeVectors));
  __syncwarp();  // the row first
  StepState early_state = job.load_state_early(p, traits, kSlotsLoadedEarly);
  job.load_state_late(p, traits, early_state, kSlotsLoadedEarly);
  PhaseClock clock(p.phase_clocks, blockIdx.x, job.writer);
  clock.stamp();
  own.bins.clear(ctx.thread);
  OutputWriter output = job.output(p, traits);  // here, where there is time for parameters to come
  output.keep(traits);
  if (ctx.thread == 0) sm.hinted = sm.at_or_above = sm.small_count = 0;
  job.publish_state(p, traits, early_state, kSlotsLoadedEarly);
  float* next = nullptr;
  if (job.is_least_busy()) next = reinterpret_cast<float*>(job.next_state_slot(p, traits, output));
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
  const float last_window = traits.has(LaunchTraits::kReadsState) ? sm.facts.state.z_score : kNoState;
  const bool guessed = traits.has(LaunchTraits::kReadsState) && ValueWindow::is_known(last_window);
  uint32_t kth = 0;
  // Writes what is selected, and says how it was found. Inlined twice, so that the usual way is straight.
  const auto finish_row = [&](auto key_of, bool tied, bool window_hit, int rounds) {
    uint32_t before = 0;
    if (tied) {
      select_ties(ctx, tile, split, before);
    } else {
      select_boundary(ctx, tile, own.bins, split, before, kth, key_of);
    }
    job.count_whole_hint(p, traits, kth);
    clock.stamp();
    stage_selected(ctx, tile, split.above, before, own.staged);
    __syncthreads();
    write_staged(ctx, traits, own.staged, output);
    clock.stamp();
    if (ctx.thread != 0 || !traits.has(LaunchTraits::kStats)) return;
    write_stats(stats_of(p, traits, job.row), path, 1, static_cast<int>(split.boundary_count), rounds,
                job.hint(p, traits).prior != nullptr ? static_cast<int>(sm.at_or_above) : -1,
                guessed ? kGuessValue : kGuessNone, window_hit, rounds - guessed);
  };
  if (guessed && try_predicted_window(ctx, tile, own.bins, last_window, next, split)) {
    if (split.rank == split.boundary_count && !traits.has(LaunchTraits::kStats))
      split.take_all();  // no need to know the k-th
    clock.stamp();
    finish_row([](uint32_t bits) { return order_key(__uint_as_float(bits)); }, false, true, guessed);
    return;
  }
  tile.make_keys();
  int rounds = guessed;
  uint32_t dense_bin = 0;
  const KeyRange range = narrow_keys(ctx, tile, own.bins, rounds, dense_bin);
  split = split_at(tile, range);
  kth = whole_key<T>(range.base);
  clock.stamp();
  const bool tied = split.boundary_count > kRankDirectly;
  if (next != nullptr) *next = window_around<T>(range.base, dense_bin, tied);
  finish_row([](uint32_t bits) { return whole_key<T>(bits); }, tied, false, rounds);
}

}  // namespace gvr_topk::small_row
