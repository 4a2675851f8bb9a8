// Phase 1, guess: a narrow bracket for the k-th key, from what is known of it: where it stood among a sample
// of the row after the last step (moments.cuh), or how many of the values hinted by the last step were at or
// above it; or else from the row alone.
//
// Of the hinted values a share alpha lay at or above the last step's k-th value; alpha moves slowly, so the
// k-th value of this step stands near the same place among this step's hinted values.
#pragma once

#include "core/predictor.cuh"
#include "core/row_sample.cuh"
#include "core/sample_interval.cuh"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// Of a hint that hit less than this, a sample of the row is worth more: sooner where the row is at hand than
// where it is long, or the chip busy with others.
constexpr float kMinHintShare = 0.1f, kMinHintShareResident = 0.25f;

struct HintView {
  const int32_t* prior;  // null: no hint
  int offset;
};

__device__ __forceinline__ HintView hint_view(const TopkParams& p, int slot) {
  return HintView{slot >= 0 && p.prior != nullptr ? p.prior + slot * p.prior_stride : nullptr,
                  p.prior_offset};
}

// This thread's position of a sample of the hint; negative: none. Its load is started.
template <typename T>
__device__ __forceinline__ int32_t sampled_position(const RowContext<T>& ctx, const HintView& hint) {
  if (hint.prior == nullptr) return -1;
  // Evenly spaced over a long hint, all of a short one. Warps look all over the row, so that their statistics
  // do not depend on where; four lanes together, or as many lines as lanes would be fetched.
  const uint32_t k = ctx.k;
  const uint32_t place = (ctx.lane & 28) * kWarps + 4 * ctx.warp + (ctx.lane & 3);
  const uint32_t at = k > kThreads ? place * k / kThreads : place;
  return at < k ? hint.prior[at] : -1;
}

// The score at a hinted position, or nothing where that is outside the row. Its load is started; whoever asks
// for the key waits for it.
template <typename T>
struct HintedScore {
  T score;
  bool there;

  __device__ __forceinline__ HintedScore(const RowContext<T>& ctx, const HintView& hint, int32_t position) {
    // Padding is recognised before the offset: -1 + 1 is not position 0. Sums that leave the range of int are
    // unsigned numbers beyond every length, as negative ones are.
    const uint32_t at = static_cast<uint32_t>(position) + static_cast<uint32_t>(hint.offset);
    there = position >= 0 && at < static_cast<uint32_t>(ctx.row.n);
    score = ctx.row.data[there ? at : 0];  // anything: a branch would wait for it
  }

  __device__ __forceinline__ uint32_t key() const { return there ? order_key(to_float(score)) : kAbsentKey; }
};

// Whether the gate lets the last step have a say in rows of this length.
template <typename T>
__device__ __forceinline__ bool is_allowed(const RowContext<T>& ctx) {
  return length_reason(ctx.row.n) == GateReason::kAllowed;
}

// Whether the hint is worth more than a sample of the row. NaN and what is no share count as unknown.
template <typename T>
__device__ __forceinline__ bool is_usable(const RowContext<T>& ctx, float hint_share, float min_share) {
  return is_allowed(ctx) && hint_share >= min_share && hint_share <= 1.0f;
}

// The same bracket in the whole block. Each CTA makes it for itself; where hints change meanwhile brackets
// may differ, which shows in the exchange.
template <typename T>
__device__ __forceinline__ KeyInterval guess_by_hint(const RowContext<T>& ctx, uint32_t hinted,
                                                     float hint_share) {
  return sample_interval(ctx, hinted, SampleRank(hint_share), kGuessHint);
}

// By a sample that this CTA takes alone. `probed` runs when all its loads have come.
template <typename T, typename Looked>
__device__ __forceinline__ KeyInterval guess_by_row(const RowContext<T>& ctx, Looked probed) {
  const RowSampler sampling(ctx, false, ctx.row.n);
  const uint32_t greatest = sampling.probe(ctx);
  probed();
  return sample_interval(ctx, greatest, SampleRank(sampling.share(ctx)), kGuessRowSample);
}

// By a sample that the CTAs of the cluster have divided among them: all of them come here, or none.
// `greatest`: what this thread's group of lanes made of its part.
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

// How to look at a row of which nothing was left: as has been done ahead, if that serves.
template <typename T, int kProbes>
__device__ __forceinline__ RowSampler sampling_of(const RowContext<T>& ctx, const LaunchTraits& traits,
                                                  const RowProbe<T, kProbes>& ahead) {
  return RowSampler(ctx, true, ahead.serves(traits, ctx.row.n) ? ahead.span : ctx.row.n);
}

// For a launch that is fed, by a block that has agreed on `state`: as predicted, or without that by the
// hint, which find_hint() tells of, or by the row. No CTA waits for another here, because another may have
// read something else. `probed` runs when all loads of a sample are under way, or have come.
template <typename T, typename FindHint, typename Looked>
__device__ __forceinline__ KeyInterval guess(const RowContext<T>& ctx, const Moments& moments,
                                             FindHint find_hint, const StepState& state, float min_share,
                                             Looked probed) {
  if (has_value(state)) return predicted(moments, state);
  if (state.z_score == kInfinite) return KeyInterval{kPosInfKey, kPosInfKey, kGuessValue};
  // All that is finite, of a row that is masked nearly everywhere.
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

// For a launch of which nothing is fed back, which all CTAs know.
template <typename T, int kProbes, typename Looked>
__device__ __forceinline__ KeyInterval guess_unfed(const RowContext<T>& ctx, const LaunchTraits& traits,
                                                   const RowProbe<T, kProbes>& ahead,
                                                   const RowSampler& sampling, Looked probed) {
  const uint32_t greatest =
      ahead.serves(traits, ctx.row.n) ? sampling.probe(ctx, ahead.seen()) : sampling.probe(ctx);
  probed();
  return guess_by_cluster(ctx, sampling, greatest);
}

}  // namespace gvr_topk
