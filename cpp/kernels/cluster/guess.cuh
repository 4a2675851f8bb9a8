// Phase 1, guess: a narrow bracket for the k-th key.
//
// Of the values hinted by the previous step a share alpha lay at or above that step's k-th value;
// alpha moves slowly, so the k-th value of this step stands near the same place among this step's
// hinted values. Without a usable hint the sample is the row itself, where the share is k / n.
#pragma once

#include "cluster/row_sample.cuh"

namespace gvr_topk::cluster {

// Of a hint that hit less than this, a sample of the row is worth more: sooner where the row is at hand than
// where it is long, or the chip busy with others.
constexpr float kWorthlessAlpha = 0.1f, kWorthlessAtHand = 0.25f;

struct HintView {
  const int32_t* prior;  // null: no hint
  float alpha;           // as the last step left it: negative or NaN when unknown
  int offset;
  int32_t sampled;  // this thread's position of the sample; negative: none
};

// Starts the loads of the hint: gathering through them is the longest chain of dependent reads in the kernel.
__device__ __forceinline__ HintView hint_view(const TopkParams& p, int slot) {
  HintView hint;
  hint.prior = nullptr;
  hint.alpha = -1.0f;
  hint.offset = p.prior_offset;
  hint.sampled = -1;
  if (slot < 0) return hint;
  hint.prior = p.prior + slot * p.prior_stride;
  // Evenly spaced over a long hint, all of a short one. Warps look all over the row, so that their statistics
  // do not depend on where; four lanes together, or as many lines as lanes would be fetched.
  const uint32_t k = p.k;
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t place = (lane & 28) * kWarps + 4 * warp + (lane & 3);
  const uint32_t at = k > kThreads ? place * k / kThreads : place;
  if (at < k) hint.sampled = hint.prior[at];
  if (p.guess_state != nullptr) hint.alpha = p.guess_state[slot];
  return hint;
}

// The score at a hinted position, or nothing where that is outside the row. Its load is started; whoever asks
// for the key waits for it.
template <typename T>
struct HintedScore {
  T score;
  bool there;

  __device__ __forceinline__ HintedScore(const Task<T>& task, const HintView& hint, int32_t position,
                                         bool wanted) {
    // Padding is recognised before the offset: -1 + 1 is not position 0. Sums that leave the range of int are
    // unsigned numbers beyond every length, as negative ones are.
    const uint32_t at = static_cast<uint32_t>(position) + static_cast<uint32_t>(hint.offset);
    there = wanted && position >= 0 && at < static_cast<uint32_t>(task.row.n);
    score = task.row.data[there ? at : 0];  // anything: a branch would wait for it
  }

  __device__ __forceinline__ uint32_t key() const { return there ? order_key(to_float(score)) : kAbsentKey; }
};

// Of this thread's sampled position. Where the guess does without it, one CTA's are enough, of which comes
// the alpha of the next step.
template <typename T>
__device__ __forceinline__ HintedScore<T> gather_hint(const Task<T>& task, const HintView& hint,
                                                      bool by_hint) {
  return HintedScore<T>(task, hint, hint.sampled, by_hint || task.rank == 0);
}

// Whether the hint is worth more than a sample of the row, as far as this thread can see.
template <typename T>
__device__ __forceinline__ bool is_usable(const Task<T>& task, const HintView& hint, bool use_hint,
                                          float worthless = kWorthlessAlpha) {
  // Length first: it is known sooner than alpha. NaN and what is no share count as unknown.
  return use_hint && length_reason(task.row.n) == GateReason::kAllowed && hint.alpha >= worthless &&
         hint.alpha <= 1.0f;
}

// Both guesses are `divided` among the CTAs, or made by each for itself; the same by the whole block. Where
// not by the whole cluster, brackets differ, which shows in the exchange.
template <typename T>
__device__ __forceinline__ Bracket guess_by_hint(const Task<T>& task, const HintView& hint, uint32_t hinted,
                                                 bool divided) {
  const Bracket bracket = sample_bracket(task, Sample{hinted, hint.alpha, kGuessHint});
  // Others of the cluster may have read another state of the hint, and wait for samples.
  if (divided && task.ctas > 1 && task.contested) send_sample(task, kAbsentKey);
  return bracket;
}

// `greatest`: what this thread's group of lanes made of its part of the sample.
template <typename T>
__device__ __forceinline__ Bracket guess_by_row(const Task<T>& task, const RowSampling& sampling,
                                                uint32_t greatest, bool divided) {
  if (divided && task.ctas > 1) greatest = sample_of_cluster(task, greatest);
  return sample_bracket(task, Sample{greatest, sampling.share(task), kGuessRowSample});
}

}  // namespace gvr_topk::cluster
