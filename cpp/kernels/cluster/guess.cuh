// Phase 1, guess: a narrow bracket for the k-th key, from what is known of it: where it stood among a sample
// of the row after the last step (moments.cuh), or how many of the values hinted by the last step were at or
// above it; or else from the row alone.
//
// Of the hinted values a share alpha lay at or above the last step's k-th value; alpha moves slowly, so the
// k-th value of this step stands near the same place among this step's hinted values.
#pragma once

#include "cluster/predictor.cuh"
#include "cluster/row_sample.cuh"

namespace gvr_topk::cluster {

// Of a hint that hit less than this, a sample of the row is worth more: sooner where the row is at hand than
// where it is long, or the chip busy with others.
constexpr float kWorthlessAlpha = 0.1f, kWorthlessAtHand = 0.25f;

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
__device__ __forceinline__ int32_t sampled_position(const Task<T>& task, const HintView& hint) {
  if (hint.prior == nullptr) return -1;
  // Evenly spaced over a long hint, all of a short one. Warps look all over the row, so that their statistics
  // do not depend on where; four lanes together, or as many lines as lanes would be fetched.
  const uint32_t k = task.k;
  const uint32_t place = (task.lane & 28) * kWarps + 4 * task.warp + (task.lane & 3);
  const uint32_t at = k > kThreads ? place * k / kThreads : place;
  return at < k ? hint.prior[at] : -1;
}

// The score at a hinted position, or nothing where that is outside the row. Its load is started; whoever asks
// for the key waits for it.
template <typename T>
struct HintedScore {
  T score;
  bool there;

  __device__ __forceinline__ HintedScore(const Task<T>& task, const HintView& hint, int32_t position) {
    // Padding is recognised before the offset: -1 + 1 is not position 0. Sums that leave the range of int are
    // unsigned numbers beyond every length, as negative ones are.
    const uint32_t at = static_cast<uint32_t>(position) + static_cast<uint32_t>(hint.offset);
    there = position >= 0 && at < static_cast<uint32_t>(task.row.n);
    score = task.row.data[there ? at : 0];  // anything: a branch would wait for it
  }

  __device__ __forceinline__ uint32_t key() const { return there ? order_key(to_float(score)) : kAbsentKey; }
};

// Whether the gate lets the last step have a say in rows of this length.
template <typename T>
__device__ __forceinline__ bool is_allowed(const Task<T>& task) {
  return length_reason(task.row.n) == GateReason::kAllowed;
}

// Whether the hint is worth more than a sample of the row. NaN and what is no share count as unknown.
template <typename T>
__device__ __forceinline__ bool is_usable(const Task<T>& task, float alpha, float worthless) {
  return is_allowed(task) && alpha >= worthless && alpha <= 1.0f;
}

// The same bracket in the whole block. Each CTA makes it for itself; where hints change meanwhile brackets
// may differ, which shows in the exchange.
template <typename T>
__device__ __forceinline__ Bracket guess_by_hint(const Task<T>& task, uint32_t hinted, float alpha) {
  return sample_bracket(task, hinted, Above(alpha), kGuessHint);
}

// By a sample that this CTA takes alone. `looked` runs when all its loads have come.
template <typename T, typename Looked>
__device__ __forceinline__ Bracket guess_by_row(const Task<T>& task, Looked looked) {
  const RowSampling sampling(task, false, task.row.n);
  const uint32_t greatest = sampling.look(task);
  looked();
  return sample_bracket(task, greatest, Above(sampling.share(task)), kGuessRowSample);
}

// By a sample that the CTAs of the cluster have divided among them: all of them come here, or none.
// `greatest`: what this thread's group of lanes made of its part.
template <typename T>
__device__ __forceinline__ Bracket guess_by_cluster(const Task<T>& task, const RowSampling& sampling,
                                                    uint32_t greatest) {
  Above above;
  if (task.ctas > 1) {
    greatest = sample_of_cluster(task, greatest, [&] { above = Above(sampling.share(task)); });
  } else {
    above = Above(sampling.share(task));
  }
  return sample_bracket(task, greatest, above, kGuessRowSample);
}

// How to look at a row of which nothing was left: as has been done ahead, if that serves.
template <typename T, int kLooks>
__device__ __forceinline__ RowSampling sampling_of(const Task<T>& task, const Shape& shape,
                                                   const Ahead<T, kLooks>& ahead) {
  return RowSampling(task, true, ahead.serves(shape, task.row.n) ? ahead.span : task.row.n);
}

// For a launch that is fed, by a block that has agreed on `feedback`: as predicted, or without that by the
// hint, which find_hint() tells of, or by the row. No CTA waits for another here, because another may have
// read something else. `looked` runs when all loads of a sample are under way, or have come.
template <typename T, typename FindHint, typename Looked>
__device__ __forceinline__ Bracket guess(const Task<T>& task, const Moments& moments, FindHint find_hint,
                                         const Feedback& feedback, float worthless, Looked looked) {
  if (tells_value(feedback)) return predicted(moments, feedback);
  if (feedback.place == kInfinite) return Bracket{kPosInfKey, kPosInfKey, kGuessValue};
  // All that is finite, of a row that is masked nearly everywhere.
  if (feedback.place == kMasked) return Bracket{kLeastFiniteKey, kMostFiniteKey, kGuessValue};
  if (moments.found_none()) return Bracket{kLeastFiniteKey, kMostFiniteKey, kGuessRowSample};
  if (is_usable(task, feedback.place, worthless)) {
    const HintView hint = find_hint();
    const HintedScore<T> score(task, hint, sampled_position(task, hint));
    const uint32_t hinted = score.key();
    looked();
    return guess_by_hint(task, hinted, feedback.place);
  }
  return guess_by_row(task, looked);
}

// For a launch of which nothing is fed back, which all CTAs know.
template <typename T, int kLooks, typename Looked>
__device__ __forceinline__ Bracket guess_unfed(const Task<T>& task, const Shape& shape,
                                               const Ahead<T, kLooks>& ahead, const RowSampling& sampling,
                                               Looked looked) {
  const uint32_t greatest =
      ahead.serves(shape, task.row.n) ? sampling.look(task, ahead.seen()) : sampling.look(task);
  looked();
  return guess_by_cluster(task, sampling, greatest);
}

}  // namespace gvr_topk::cluster
