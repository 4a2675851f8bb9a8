// Selects the top k of rows that registers do not hold and that cannot stream (a large k, consumer
// Blackwell), and of any row with path `radix_rounds`.
//
// Grid: rows * ctas CTAs of 512 threads, in clusters of `ctas` along x; cluster r works on row r.
//
// Phases:
// - guess: an interval of keys that is believed to hold the k-th, from the last step's state or from a sample
//   of the row; for a large k a second, larger sample narrows it (fallback/narrow.cuh);
// - verify: the row streams through shared memory, and every element is compared with the interval; elements
//   above it are counted, and elements inside it are listed; one exchange joins the CTAs;
// - refine: the exact k-th key is found among the listed ones (cluster/select.cuh);
// - emit: the row streams once more, unless the rings hold it, and each warp writes its selected positions
//   (fallback/two_reads.cuh).
//
// An interval that misses is moved once, if its counts allow that. After that radix rounds decide
// (fallback/radix_fallback.cuh). The result never depends on the guess.
#pragma once

#include "cluster/row_job.cuh"
#include "fallback/narrow.cuh"
#include "fallback/radix_fallback.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::fallback {

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    fallback_topk(const __grid_constant__ LaunchTraits traits, const __grid_constant__ TopkParams p) {
  constexpr auto kStartOver = radix_fallback_from_start<T, true>;
  ptx::grid_take_over();
  RowJob<T, true> job(p, traits, storage);
  const RowContext<T>& ctx = job.ctx;
  prepare_exchange(ctx);
  StepState state = job.load_state_early(p, traits);
  job.load_state_late(p, traits, state);
  ptx::reconverge(ctx.zero);  // Single threads have loaded the state and initialized barriers.
  arrive_at_start(ctx);
  job.publish_state(p, traits, state);
  job.agree_on_length(p, traits);
  ptx::reconverge(ctx.zero);  // Single threads have published what the block reads.
  if (job.is_short()) {
    if (!finish_unselected_row(p, traits, job, false)) kStartOver(p, traits, kGuessNone, 1);
    return;
  }

  if (ctx.ctas > 1) ptx::cluster_wait();
  const KeyInterval everything = KeyInterval::everything();
  if (traits.has(LaunchTraits::kRadixOnly)) {
    // CTAs have to agree on the length before the rounds, so one exchange comes first.
    send_and_wait(ctx, everything, 0, [] {});
    kStartOver(p, traits, kGuessNone, 1);
    return;
  }

  // Guess.
  state = shared_state(ctx.shared->facts.state);
  KeyInterval interval = guess(ctx, job.hint_reason(p, traits, is_known(state)), state, Moments());
  uint32_t exchanges = 0;
  bool agreed = true;
  if (!traits.has(LaunchTraits::kReadsState) && needs_narrowing(ctx)) {
    agreed = narrow(ctx, interval, exchanges++);
  }

  // Verify, refine and emit.
  const FallbackState start{FallbackStage::kGuess, interval, interval.source, exchanges, 0, ctx.row.n};
  if (!agreed || !run_stages(p, traits, job, start)) {
    kStartOver(p, traits, interval.source, exchanges + agreed);
  }
}

}  // namespace gvr_topk::fallback
