// Phase 1, guess: finds a narrow interval for the k-th key, from the state of the slot
// (cluster/predictor.cuh) or from a sample of the row; and where an interval has missed, what its counts say:
// which range holds the k-th key, and which interval to try next.
#pragma once

#include <cstdint>

#include "cluster/messages.cuh"
#include "cluster/predictor.cuh"
#include "cluster/row_context.cuh"
#include "cluster/sample.cuh"
#include "core/key_range.cuh"
#include "gvr_topk/policy.h"
#include "ptx/warp.cuh"

namespace gvr_topk {

// The interval from a sample that this CTA takes alone.
template <typename T>
GVR_DEVICE KeyInterval guess_by_row(const RowContext<T>& ctx) {
  const RowSampler sampling(ctx, false, ctx.row.n);
  const Sample sample = sample_of_cta(ctx, sampling.probe(ctx));
  return sample_interval(ctx, sample, SampleRank(sampling.share(ctx)));
}

// The sampler of a row without state. It uses the probes that were taken early, if they serve.
template <typename T>
GVR_DEVICE RowSampler sampling_of(const RowContext<T>& ctx, const RowProbe<T>& probe) {
  return RowSampler(ctx, true, probe.serves(ctx.row.n) ? probe.span : ctx.row.n);
}

// The interval for a launch that reads state. The block has agreed on `state` and on the gate's answer
// `reason`. No CTA waits for another one in here, because the other may have read something else.
template <typename T>
GVR_DEVICE KeyInterval guess(const RowContext<T>& ctx, HintReason reason, const StepState& state,
                             const Moments& moments) {
  if (__any_sync(0xffffffffu, reason == HintReason::kUsed)) {
    if (has_value(state)) {
      // All lanes have the same. A reduction shows it to the compiler, which would guard what follows.
      const KeyInterval interval = predicted_interval(moments, state);
      return KeyInterval{__reduce_min_sync(0xffffffffu, interval.lo),
                         __reduce_min_sync(0xffffffffu, interval.hi), interval.source};
    }
    if (state.z_score <= kStateInfinite) return KeyInterval{kPosInfKey, kPosInfKey, kGuessValue};
    // The row is masked nearly everywhere, so the interval is everything finite.
    return KeyInterval{kLeastFiniteKey, kMostFiniteKey, kGuessValue};
  }
  if (__any_sync(0xffffffffu, moments.counted_none()))
    return KeyInterval{kLeastFiniteKey, kMostFiniteKey, kGuessRowSample};
  return guess_by_row(ctx);
}

// The interval for a launch without state. All CTAs know that there is no state, so they divide a sample
// among them. `probed` runs once all loads of the sample are done, and `meanwhile` while its keys are under
// way.
template <typename T, typename Probed, typename Meanwhile>
GVR_DEVICE KeyInterval guess_without_state(const RowContext<T>& ctx, const RowProbe<T>& probe,
                                           const RowSampler& sampling, Probed probed, Meanwhile meanwhile) {
  const uint32_t greatest = probe.serves(ctx.row.n) ? sampling.probe(ctx, probe.seen()) : sampling.probe(ctx);
  probed();
  SampleRank above;
  const auto rank = [&] {
    above = SampleRank(sampling.share(ctx));
    meanwhile();
  };
  Sample sample;
  if (ctx.ctas > 1) {
    sample = sample_of_cluster(ctx, greatest, rank);
  } else {
    rank();
    sample = sample_of_cta(ctx, greatest);
  }
  return sample_interval(ctx, sample, above);
}

// Moves an interval that has just missed, for a second pass that fills half of the list (core/key_range.cuh).
// Returns false if radix rounds must decide. All CTAs have the same counts, and so the same interval.
template <typename T>
GVR_DEVICE bool move_interval(const RowContext<T>& ctx, const CountResult& result, KeyInterval& missed) {
  const uint32_t capacity = static_cast<uint32_t>(ctx.list.segment() << ctx.log2_ctas) / 2;
  return result.agreed && !result.contains_k &&
         move_by_counts(result.above, result.inside, ctx.k, capacity, missed);
}

// Returns whether the counts of an interval show that the k-th value is -inf: fewer than k elements are
// greater than -inf.
GVR_DEVICE bool is_masked(const KeyInterval& interval, const CountResult& result, int k) {
  return interval.lo == kLeastFiniteKey && result.above + result.inside < static_cast<uint32_t>(k);
}

// Returns the range of keys that holds the k-th key, according to the counts of an interval that missed. All
// CTAs must have agreed on the counts.
GVR_DEVICE KeyInterval range_of(const CountResult& result, const KeyInterval& interval, int k) {
  if (result.contains_k) return interval;
  if (result.above >= static_cast<uint32_t>(k)) return KeyInterval{interval.hi + 1, kMaxKey, kGuessNone};
  return KeyInterval{kMinKey, interval.lo - 1, kGuessNone};
}

}  // namespace gvr_topk
