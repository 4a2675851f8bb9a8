// Phase 1, guess: finds a narrow interval for the k-th key, from the state of the slot
// (cluster/predictor.cuh) or from a sample of the row.
#pragma once

#include "cluster/predictor.cuh"
#include "cluster/row_sample.cuh"
#include "cluster/sample_interval.cuh"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// The interval from a sample that this CTA takes alone.
template <typename T>
__device__ __forceinline__ KeyInterval guess_by_row(const RowContext<T>& ctx) {
  const RowSampler sampling(ctx, false, ctx.row.n);
  const uint32_t greatest = sampling.probe(ctx);
  return sample_interval(ctx, greatest, SampleRank(sampling.share(ctx)));
}

// The interval from a sample that the CTAs of the cluster divide among them. Either all CTAs call this, or
// none. `greatest`: the greatest key that this thread's group of lanes has read.
template <typename T>
__device__ __forceinline__ KeyInterval guess_by_cluster(const RowContext<T>& ctx, const RowSampler& sampling,
                                                        uint32_t greatest) {
  SampleRank above;
  if (ctx.ctas > 1) {
    greatest = sample_of_cluster(ctx, greatest, [&] { above = SampleRank(sampling.share(ctx)); });
  } else {
    above = SampleRank(sampling.share(ctx));
  }
  return sample_interval(ctx, greatest, above);
}

// The sampler of a row without state. It uses the probes that were taken early, if they serve.
template <typename T, int kProbes>
__device__ __forceinline__ RowSampler sampling_of(const RowContext<T>& ctx, const LaunchTraits& traits,
                                                  const RowProbe<T, kProbes>& probe) {
  return RowSampler(ctx, true, probe.serves(traits, ctx.row.n) ? probe.span : ctx.row.n);
}

// The interval for a launch that reads state. The block has agreed on `state` and on the gate's answer
// `reason`. No CTA waits for another one in here, because the other may have read something else.
template <typename T>
__device__ __forceinline__ KeyInterval guess(const RowContext<T>& ctx, HintReason reason,
                                             const StepState& state, const Moments& moments) {
  if (reason == HintReason::kUsed) {
    if (has_value(state)) return predicted_interval(moments, state);
    if (state.z_score <= kStateInfinite) return KeyInterval{kPosInfKey, kPosInfKey, kGuessValue};
    // The row is masked nearly everywhere, so the interval is everything finite.
    return KeyInterval{kLeastFiniteKey, kMostFiniteKey, kGuessValue};
  }
  if (moments.counted_none()) return KeyInterval{kLeastFiniteKey, kMostFiniteKey, kGuessRowSample};
  return guess_by_row(ctx);
}

// The interval for a launch without state. All CTAs know that there is no state, so they sample together.
// `probed` runs once all loads of the sample are done.
template <typename T, int kProbes, typename Probed>
__device__ __forceinline__ KeyInterval guess_without_state(const RowContext<T>& ctx,
                                                           const LaunchTraits& traits,
                                                           const RowProbe<T, kProbes>& probe,
                                                           const RowSampler& sampling, Probed probed) {
  const uint32_t greatest =
      probe.serves(traits, ctx.row.n) ? sampling.probe(ctx, probe.seen()) : sampling.probe(ctx);
  probed();
  return guess_by_cluster(ctx, sampling, greatest);
}

}  // namespace gvr_topk
