// The row stays on chip: one cluster of 1 to 16 CTAs holds it in registers, 16 or 32 elements a thread, so
// global memory is read once and one exchange joins the CTAs.
//
// Only the way a guessed bracket takes is in this kernel's own code, which is kept short: at this size
// time is instructions issued and fetched. Where no bracket holds, `resolve_miss_resident` takes the row from
// where it lies in shared memory and settles it by radix rounds, whatever it contains.
#pragma once

#include <algorithm>

#include "core/guess.cuh"
#include "core/row_job.cuh"
#include "fallback/radix_fallback.cuh"
#include "resident/count_and_emit.cuh"
#include "resident/register_tile.cuh"
#include "resident/resolve_miss.cuh"

namespace gvr_topk::resident {

// The stage lies behind the list, where a fallback, which comes later, has other things.
template <typename T, int kValues>
inline size_t resident_bytes(const LaunchTraits& traits, const SmemLayout& layout) {
  constexpr size_t kStage = sizeof(T) * kThreads * kValues;
  return std::max(shared_bytes(traits, layout), fixed_bytes(traits.list_capacity(), 0) + kStage);
}

// Where anything is known of a launch, sizes are the usual ones too.
template <typename T, int kValues, Specialization kSpecialization>
__global__ void __launch_bounds__(kThreads, 1)
    resident_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ TopkParams p,
                  const __grid_constant__ SmemLayout layout) {
  constexpr int kProbes = 1;  // at the row by every thread, for its sample
  extern __shared__ __align__(128) unsigned char storage[];
  constexpr bool kCommonSizes = kSpecialization != Specialization::kGeneric;
  const LaunchTraits traits = launch_traits.in_registers<kSpecialization, kCommonSizes>();
  ptx::grid_take_over();
  RowJob<T> job(p, traits, layout, ptx::opaque_shared(storage), kCommonSizes);
  const RowContext<T>& ctx = job.ctx;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> traits.log2_ctas(), job.writer);
  clock.stamp();
  StepState state = job.load_state_early(p, traits);
  __syncwarp();  // or they would be asked for behind what comes now
  RowProbe<T, kProbes> ahead(ctx, traits);
  RegisterTile<T, kValues> tile(ctx, traits);
  int elements = p.width;
  tile.fetch(ctx, traits, elements, p.width);
  job.load_state_late(p, traits, state);
  prepare_exchange(ctx);
  arrive_at_start(ctx);
  job.publish_state(p, traits, state);
  job.agree_on_length(p, traits);
  if (job.is_short()) {
    fallback::finish_short_row(p, launch_traits, layout, storage, job,
                               !traits.has(LaunchTraits::kReadsState));
    return;
  }
  if (2 * tile.groups_of(ctx.row.n) <= tile.groups_of(p.width)) {  // or half of the warps would have it all
    elements = ctx.row.n;
    ptx::wait_copies<0>();
    __syncwarp();  // lanes fetch for each other
    ahead.fetch(ctx, traits);
    tile.fetch(ctx, traits, elements, p.width);
  }
  if (ctx.ctas > 1) ptx::cluster_wait();  // while the sample is on its way
  Moments moments;
  KeyInterval interval;
  bool sampled = true;  // or the moments are for the next step alone, and have time
  if (traits.has(LaunchTraits::kReadsState)) {
    state = ctx.shared->facts.state;
    sampled = !uses_value(state);
    if (sampled) {
      ptx::wait_copies<1>();
      moments = Moments(ctx, ahead);
    }
    interval = guess(ctx, job.hint_reason(p, traits, is_known(state)), state, moments);
  } else {
    const RowSampler sampling = sampling_of(ctx, traits, ahead);
    ptx::wait_copies<1>();
    interval = guess_unfed(ctx, traits, ahead, sampling, [] {});
  }
  const uint32_t source = interval.source;
  tile.load(ctx.lane, ctx.row.n);
  clock.stamp();

  OutputWriter output;
  StepState* next = nullptr;
  CountResult result;
  int passes = 0;
#pragma unroll 1
  while (true) {
    result = exchange(ctx, interval, tile, passes & 1, clock, [&] {
      output = job.output(p, traits);
      output.keep(traits);
      next = job.next_state_slot(p, traits, output);
      if (traits.has(LaunchTraits::kWritesState)) ptx::keep(next);
      if (!sampled) moments = Moments(ctx, ahead);
      sampled = true;
    });
    ++passes;
    if (result.complete) break;
    if (!result.agreed) {
      fallback::radix_fallback_from_start(p, launch_traits, layout, storage, ctx, source);
      return;
    }
    const KeyInterval missed = interval;
    if (passes > 1 || !move_interval(ctx, result, interval)) {
      if (ctx.thread == 0) {
        ctx.shared->missed =
            MissedGuess{missed, result, passes, ctx.row.n, elements, moments.mean, moments.deviation, source};
      }
      if (is_masked(missed, result, ctx.k)) {
        resolve_miss_masked<T, kValues>(p, launch_traits, layout, storage);
      } else {
        resolve_miss_resident<T, kValues>(p, launch_traits, layout, storage);
      }
      return;
    }
    restart_counts(ctx);
  }
  clock.stamp();

  int snaps = 0;
  const ListedKeys listed(ctx);
  const Threshold threshold = select_kth(ctx, interval, listed, result, snaps);
  clock.stamp();
  job.count_hint_hits(p, traits, threshold.key);
  count_listed(ctx, listed, threshold);
  const float level = key_to_float(threshold.key);
  const uint32_t selected = tile.not_below(level);
  uint32_t ties = 0;
  if (!threshold.takes_all()) ties = tile.equal(level);
  emit_tile(ctx, interval, threshold, result.above_before, tile, selected, ties, output, clock, [&] {
    if (job.is_least_busy() && next != nullptr) {
      *next = next_state(ctx, moments, threshold.key, interval, result);
    }
    job.report(p, traits, passes, result.inside, snaps, source, passes == 1, 0);
  });
  clock.stamp();
}

}  // namespace gvr_topk::resident
