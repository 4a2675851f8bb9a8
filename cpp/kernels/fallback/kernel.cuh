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

  Tile<T> tile;
  if (ctx.steps == 1) load_tile(ctx.row, ctx.begin, ctx.end, ctx.lane, tile);
  const HintView hint = job.hint(p, traits);
  const int32_t sampled = sampled_position(ctx, hint);
  if (ctx.ctas > 1) ptx::cluster_wait();
  const uint32_t hinted = HintedScore<T>(ctx, hint, sampled).key();
  const float hint_share = ctx.shared->facts.state.z_score;
  const KeyInterval interval = is_usable(ctx, hint_share, kMinHintShare)
                                   ? guess_by_hint(ctx, hinted, hint_share)
                                   : guess_by_row(ctx, [] {});
  clock.stamp();
  const KeyInterval everything = KeyInterval::everything();
  const FallbackState start{FallbackStage::kGuess, interval, everything, interval.source, 0, ctx.row.n};
  if (!run_stages(p, traits, job, hinted, tile, start, clock)) {
    radix_fallback_from_start(p, traits, layout, storage, ctx, interval.source);
  }
}

}  // namespace gvr_topk::fallback
