// Phase 1, guess: a narrow interval for the k-th key. It comes from the state of the slot
// (core/predictor.cuh); or from the hint, if the state is a share of it; or else from a sample of the row.
//
// The share of hinted values at or above the k-th value changes slowly from step to step. So the k-th value
// of this step stands near the same quantile of this step's hinted values.
#pragma once

#include "core/predictor.cuh"
#include "core/row_sample.cuh"
#include "core/sample_interval.cuh"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// A hint of which a smaller share hit is worth less than a sample of the row. The bound is higher where the
// row is at hand than where it is long, or where many rows share the chip.
constexpr float kMinHintShare = 0.1f, kMinHintShareResident = 0.25f;

struct HintView {
  const int32_t* prior;  // null: no hint
  int offset;
};

__device__ __forceinline__ HintView hint_view(const TopkParams& p, int slot) {
  return HintView{slot >= 0 && p.prior != nullptr ? p.prior + slot * p.prior_stride : nullptr,
                  p.prior_offset};
}

// Starts to load this thread's position of a sample of the hint. Negative: none.
template <typename T>
__device__ __forceinline__ int32_t sampled_position(const RowContext<T>& ctx, const HintView& hint) {
  if (hint.prior == nullptr) return -1;
  // The sample is evenly spaced over a long hint, and all of a short one. Each warp looks all over the row,
  // so that statistics of warps do not differ by region. Four lanes stay together, or as many lines as lanes
  // would be fetched.
  const uint32_t k = ctx.k;
  const uint32_t index = (ctx.lane & 28) * kWarps + 4 * ctx.warp + (ctx.lane & 3);
  const uint32_t at = k > kThreads ? index * k / kThreads : index;
  return at < k ? hint.prior[at] : -1;
}

// The score at a hinted position, or nothing if that lies outside the row. The constructor starts the load;
// `key` waits for it.
template <typename T>
struct HintedScore {
  T score;
  bool there;

  __device__ __forceinline__ HintedScore(const RowContext<T>& ctx, const HintView& hint, int32_t position) {
    // Padding is recognised before the offset is added: -1 + 1 is not position 0. As unsigned numbers, sums
    // that overflow are beyond every length, as negative ones are.
    const uint32_t at = static_cast<uint32_t>(position) + static_cast<uint32_t>(hint.offset);
    there = position >= 0 && at < static_cast<uint32_t>(ctx.row.n);
    score = ctx.row.data[there ? at : 0];  // Any address will do: a branch would wait for the position.
  }

  __device__ __forceinline__ uint32_t key() const { return there ? order_key(to_float(score)) : kAbsentKey; }
};

// Whether the policy lets the state be used for rows of this length.
template <typename T>
__device__ __forceinline__ bool is_allowed(const RowContext<T>& ctx) {
  return length_reason(ctx.row.n) == GateReason::kAllowed;
}

// Whether the hint is worth more than a sample of the row. NaN, and what is no share, is not.
template <typename T>
__device__ __forceinline__ bool is_usable(const RowContext<T>& ctx, float hint_share, float min_share) {
  return is_allowed(ctx) && hint_share >= min_share && hint_share <= 1.0f;
}

// An interval by this thread's hinted value, the same in the whole block. Each CTA makes it for itself: where
// hints change meanwhile intervals may differ, which the exchange notices.
template <typename T>
__device__ __forceinline__ KeyInterval guess_by_hint(const RowContext<T>& ctx, uint32_t hinted,
                                                     float hint_share) {
  return sample_interval(ctx, hinted, SampleRank(hint_share), kGuessHint);
}

// An interval by a sample of the row that this CTA takes alone. `probed` runs when all its loads have come.
template <typename T, typename Looked>
__device__ __forceinline__ KeyInterval guess_by_row(const RowContext<T>& ctx, Looked probed) {
  const RowSampler sampling(ctx, false, ctx.row.n);
  const uint32_t greatest = sampling.probe(ctx);
  probed();
  return sample_interval(ctx, greatest, SampleRank(sampling.share(ctx)), kGuessRowSample);
}

// An interval by a sample that the CTAs of the cluster divide among them: all of them must call this, or
// none. `greatest`: what this thread's group of lanes made of its part.
template <typename T>
__device__ __forceinline__ KeyInterval guess_by_cluster(const RowContext<T>& ctx, const RowSampler& sampling,
                                                        uint32_t greatest) {
  SampleRank above;
  if (ctx.ctas > 1) {
    greatest = sample_of_cluster(ctx, greatest, [&] { above = SampleRank(sampling.share(ctx)); });
  } else {
    above = SampleRank(sampling.share(ctx));
  }
  return sample_interval(ctx, greatest, above, kGuessRowSample);
}

// The sampler of a row without state. It uses the probes that were taken early, if they serve.
template <typename T, int kProbes>
__device__ __forceinline__ RowSampler sampling_of(const RowContext<T>& ctx, const LaunchTraits& traits,
                                                  const RowProbe<T, kProbes>& probe) {
  return RowSampler(ctx, true, probe.serves(traits, ctx.row.n) ? probe.span : ctx.row.n);
}

// The interval for a launch that reads state, in a block that has agreed on `state`. find_hint() returns the
// hint. No CTA waits for another in here, because another may have read something else. `probed` runs when
// all loads of a sample are under way, or have come.
template <typename T, typename FindHint, typename Looked>
__device__ __forceinline__ KeyInterval guess(const RowContext<T>& ctx, const Moments& moments,
                                             FindHint find_hint, const StepState& state, float min_share,
                                             Looked probed) {
  if (has_value(state)) return predicted(moments, state);
  if (state.z_score == kInfinite) return KeyInterval{kPosInfKey, kPosInfKey, kGuessValue};
  // A row that is masked nearly everywhere: the interval is everything finite.
  if (state.z_score == kMasked) return KeyInterval{kLeastFiniteKey, kMostFiniteKey, kGuessValue};
  if (moments.counted_none()) return KeyInterval{kLeastFiniteKey, kMostFiniteKey, kGuessRowSample};
  if (is_usable(ctx, state.z_score, min_share)) {
    const HintView hint = find_hint();
    const HintedScore<T> score(ctx, hint, sampled_position(ctx, hint));
    const uint32_t hinted = score.key();
    probed();
    return guess_by_hint(ctx, hinted, state.z_score);
  }
  return guess_by_row(ctx, probed);
}

// The interval for a launch without state, which all CTAs know.
template <typename T, int kProbes, typename Looked>
__device__ __forceinline__ KeyInterval guess_without_state(const RowContext<T>& ctx,
                                                           const LaunchTraits& traits,
                                                           const RowProbe<T, kProbes>& probe,
                                                           const RowSampler& sampling, Looked probed) {
  const uint32_t greatest =
      probe.serves(traits, ctx.row.n) ? sampling.probe(ctx, probe.seen()) : sampling.probe(ctx);
  probed();
  return guess_by_cluster(ctx, sampling, greatest);
}

}  // namespace gvr_topk
