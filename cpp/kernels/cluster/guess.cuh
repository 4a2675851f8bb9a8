// Phase 1, guess: a narrow bracket for the k-th key.
//
// Of the values hinted by the previous step a share alpha lay at or above that step's k-th value;
// alpha moves slowly, so the k-th value of this step stands near the same place among this step's
// hinted values. Without a usable hint the sample is the row itself, where the share is k / n.
#pragma once

#include "cluster/row_sample.cuh"

namespace gvr_topk::cluster {

// Of a hint that hit less than this, a sample of the row is worth more.
constexpr float kWorthlessAlpha = 0.1f;

struct HintView {
  const int32_t* prior;  // null: no hint
  float alpha;           // as the last step left it: negative or NaN when unknown
  int offset;
  int32_t sampled;  // this thread's position of the sample; negative: none
};

// Starts the loads of the hint before anything is known of the row: gathering through them is the
// longest chain of dependent reads in the kernel.
__device__ __forceinline__ HintView hint_view(const TopkParams& p, int slot) {
  HintView hint;
  hint.prior = nullptr;
  hint.alpha = -1.0f;
  hint.offset = p.prior_offset;
  hint.sampled = -1;
  if (slot < 0) return hint;
  hint.prior = p.prior + slot * p.prior_stride;
  // Evenly spaced over a long hint, all of a short one; neighbours in different warps, whose statistics shall
  // not depend on where in the row they look.
  const uint32_t k = p.k;
  const uint32_t place = (threadIdx.x & 31) * kWarps + (threadIdx.x >> 5);
  const uint32_t at = k > kThreads ? place * k / kThreads : place;
  if (at < k) hint.sampled = hint.prior[at];
  if (p.guess_state != nullptr) hint.alpha = p.guess_state[slot];
  return hint;
}

template <typename T>
__device__ __forceinline__ uint32_t hinted_key(const Task<T>& task, const HintView& hint, int32_t position) {
  // Padding is recognised before the offset: -1 + 1 is not position 0.
  return position < 0 ? kAbsentKey : task.row.key_or_absent(static_cast<int64_t>(position) + hint.offset);
}

// Key of this thread's sampled position. Where the guess does without it, one CTA's are enough, of which
// comes the alpha of the next step.
template <typename T>
__device__ __forceinline__ uint32_t gather_hint(const Task<T>& task, const HintView& hint, bool by_hint) {
  return by_hint || task.rank == 0 ? hinted_key(task, hint, hint.sampled) : kAbsentKey;
}

// Whether the hint is worth more than a sample of the row, as far as this thread can see.
template <typename T>
__device__ __forceinline__ bool is_usable(const Task<T>& task, const HintView& hint, bool use_hint) {
  // Length first: it is known sooner than alpha. NaN and what is no share count as unknown.
  return use_hint && length_reason(task.row.n) == GateReason::kAllowed && hint.alpha >= kWorthlessAlpha &&
         hint.alpha <= 1.0f;
}

// `meanwhile` runs when the loads of the sample are under way. `by_hint` is the same in the whole block;
// where not in the whole cluster, brackets differ, which shows in the exchange. Samples of the row are
// `divided` among the CTAs. Behind this the CTAs of the cluster are known to run.
template <typename T, typename Meanwhile>
__device__ __forceinline__ Bracket guess(const Task<T>& task, const HintView& hint, uint32_t hinted,
                                         bool by_hint, bool divided, Meanwhile meanwhile) {
  if (by_hint) {
    meanwhile();
    const Bracket bracket = sample_bracket(task, Sample{hinted, hint.alpha, kGuessHint});
    if (task.ctas > 1) {
      ptx::cluster_wait();
      // Others of the cluster may have read another state of the hint, and wait for samples.
      if (divided && task.contested) send_sample(task, kAbsentKey);
    }
    return bracket;
  }
  const RowSampling sampling(task, divided);
  uint32_t greatest = sampling.greatest(task);
  meanwhile();
  if (task.ctas > 1) {
    if (divided) {
      greatest = sample_of_cluster(task, greatest);
    } else {
      ptx::cluster_wait();
    }
  }
  return sample_bracket(task, Sample{greatest, sampling.share(task), kGuessRowSample});
}

}  // namespace gvr_topk::cluster
