// Whatever the row holds: plateaus, rows that are not aligned, any k, brackets that fail. The other kernels
// hold the usual way only, in code kept short, and hand the rest to `run_stages`; this kernel serves what
// they cannot start.
//
// A row of more than a word per warp streams through and leaves one bit an element. A bracket that misses is
// moved, and if that fails too, radix rounds decide. The result never depends on the guess.
//
// Grid: rows * ctas CTAs of 512 threads, clusters of `ctas` along x; cluster r works on row r.
#pragma once

#include "core/row_job.cuh"
#include "fallback/radix_fallback.cuh"

namespace gvr_topk::fallback {

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    fallback_topk(const __grid_constant__ LaunchTraits traits, const __grid_constant__ TopkParams p,
                  const __grid_constant__ SmemLayout layout) {
  extern __shared__ __align__(128) unsigned char storage[];
  ptx::grid_take_over();
  RowJob<T> job(p, traits, layout, storage);
  const RowContext<T>& ctx = job.ctx;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> traits.log2_ctas(), job.writer);
  clock.stamp();
  reset_counters(ctx);
  StepState state = job.load_state_early(p, traits);
  job.load_state_late(p, traits, state);
  job.publish_state(p, traits, state);
  arrive_at_start(ctx);
  job.agree_on_length(p, traits);
  if (job.is_short()) {
    finish_short_row(p, traits, layout, storage, job, false);
    return;
  }

  if (ctx.ctas > 1) ptx::cluster_wait();
  const KeyInterval everything = KeyInterval::everything();
  if (traits.has(LaunchTraits::kRadixOnly)) {
    // One exchange first, because CTAs have to agree on the length.
    send_and_wait(ctx, everything, 0, [] {});
    radix_fallback_from_start(p, traits, layout, storage, ctx, kGuessNone);
    return;
  }
  Tile<T> tile;
  if (ctx.steps == 1) load_tile(ctx.row, ctx.begin, ctx.end, ctx.lane, tile);
  state = ctx.shared->facts.state;
  const KeyInterval interval =
      guess(ctx, job.hint_reason(p, traits, is_known(state)), state, Moments::unknown());
  clock.stamp();
  const FallbackState start{FallbackStage::kGuess, interval, everything, interval.source, 0, ctx.row.n};
  if (!run_stages(p, traits, job, tile, start, clock)) {
    radix_fallback_from_start(p, traits, layout, storage, ctx, interval.source);
  }
}

}  // namespace gvr_topk::fallback
