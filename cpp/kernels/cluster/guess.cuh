// Phase 1, guess: a narrow bracket for the k-th key from a sample of some hundred values.
//
// Of the values hinted by the previous step a share alpha lay at or above that step's k-th value;
// alpha moves slowly, so the k-th value of this step stands near the same place among this step's
// hinted values. Without a usable hint the sample is the row itself, where the share is k / n. Either
// way the bracket is a pair of order statistics around that place, distribution-free.
#pragma once

#include "cluster/state.cuh"
#include "ptx/compare.cuh"

namespace gvr_topk::cluster {

// Of a hint that hit less than this, a sample of the row is worth more.
constexpr float kWorthlessAlpha = 0.1f;
// Hints that hit nearly always show nothing below the k-th value.
constexpr float kNearlyAll = 0.96f;
// Of 16 warps' order statistics, those this far from the outside are the bracket: a sign test, missed by
// chance once in 240 times, and wider of itself where neighbours in the hint resemble each other.
constexpr int kOutsiders = 2;

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
  // Evenly spaced over a long hint, all of a short one.
  const uint32_t k = p.k;
  const uint32_t at = k > kThreads ? threadIdx.x * k / kThreads : threadIdx.x;
  if (at < k) hint.sampled = hint.prior[at];
  if (p.guess_state != nullptr) hint.alpha = p.guess_state[slot];
  return hint;
}

template <typename T>
__device__ __forceinline__ uint32_t hinted_key(const Task<T>& task, const HintView& hint, int32_t position) {
  // Padding is recognised before the offset: -1 + 1 is not position 0.
  return position < 0 ? kAbsentKey : task.row.key_or_absent(static_cast<int64_t>(position) + hint.offset);
}

// Key of this thread's sampled position. Gathered even when the guess does without it: from it comes the
// alpha of the next step.
template <typename T>
__device__ __forceinline__ uint32_t gather_hint(const Task<T>& task, const HintView& hint) {
  return hinted_key(task, hint, hint.sampled);
}

// Greatest of a few scattered elements of the row. Of single elements so few belong to the top k of a long
// row that their order statistics say little; of the greatest of m, a share of 1 - (1 - k/n)^m do.
template <typename T>
__device__ __forceinline__ uint32_t greatest_of_row(const Task<T>& task, int log2_per_thread) {
  uint32_t greatest = kAbsentKey;
#pragma unroll 8  // so that the loads overlap
  for (int i = 0; i < 1 << log2_per_thread; ++i) {
    // One position in each stratum, neighbouring strata in different warps, whose statistics shall not
    // depend on where in the row they look; the multiplicative hash keeps periodic rows from hiding.
    const uint32_t stratum = i * kThreads + task.lane * kWarps + task.warp;
    const uint64_t begin = static_cast<uint64_t>(stratum) * static_cast<uint32_t>(task.row.n);
    const uint32_t jitter = __umulhi(stratum * 2654435761u, task.row.n);
    greatest =
        max(greatest, task.row.key(static_cast<int>((begin + jitter) >> (kLog2Threads + log2_per_thread))));
  }
  return greatest;
}

// What there is to guess from: one key per thread, which share of them lies above the k-th, and how many
// warps may be outside the bracket at its lower end.
struct Sample {
  uint32_t key;
  float share;
  int outsiders;
  uint32_t source;
};

// How many of 4 * kVecs keys are greater than this one.
template <int kVecs>
__device__ __forceinline__ int rank_among(const uint4* keys, uint32_t mine) {
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint4 other = keys[i];
    ptx::count_if_greater(rank, other.x, mine);
    ptx::count_if_greater(rank, other.y, mine);
    ptx::count_if_greater(rank, other.z, mine);
    ptx::count_if_greater(rank, other.w, mine);
  }
  return rank;
}

// A bracket around the (1 - share) quantile of one key per thread. Each warp reads the order statistics
// beside that place off its own 32 keys; the bracket reaches from the third lowest of the lower ones to
// the third highest of the upper ones. One block barrier.
template <typename T>
__device__ __forceinline__ Bracket sample_bracket(const Task<T>& task, const Sample& sample) {
  Shared& sm = *task.shared;
  const uint32_t key = sample.key;
  const float share = sample.share;
  reinterpret_cast<uint32_t*>(sm.sample)[threadIdx.x] = key;
  __syncwarp();
  const int rank = rank_among<8>(sm.sample + 8 * task.warp, key);
  const int present = __popc(__ballot_sync(0xffffffffu, key != kAbsentKey));
  const float place = share * static_cast<float>(present);
  int upper = max(static_cast<int>(place) - 1, 0), lower = min(static_cast<int>(ceilf(place)), present - 1);
  int outsiders_above = kOutsiders, outsiders_below = share > kNearlyAll ? 0 : sample.outsiders;
  if (share < 1.0f / 32) {
    // Less than one in a warp: the greatest of each, and how many of those lie above, within three standard
    // deviations.
    const float expected = kWarps * (1.0f - __expf(-32 * share));
    const float reach = 3.0f * __fsqrt_rn(expected * (1.0f - expected / kWarps));
    upper = lower = 0;
    outsiders_above = static_cast<int>(expected - reach) - 1;
    outsiders_below = max(kWarps - 1 - static_cast<int>(ceilf(expected + reach)), 0);
  }
  // The r-th largest is the smallest key with no more than r greater ones.
  const uint32_t top = __reduce_min_sync(0xffffffffu, rank <= upper ? key : kMaxKey);
  const uint32_t bottom = __reduce_min_sync(0xffffffffu, rank <= lower ? key : kMaxKey);
  if (task.lane == 0) {
    sm.edge[0][task.warp] = top;
    sm.edge[1][task.warp] = ~bottom;
  }
  __syncthreads();
  const bool below = task.lane >= kWarps;
  const uint32_t edge = sm.edge[below][task.lane % kWarps];
  const bool near = rank_among<kWarps / 4>(reinterpret_cast<const uint4*>(sm.edge[below]), edge) <=
                    (below ? outsiders_below : outsiders_above);
  uint32_t hi = __reduce_min_sync(0xffffffffu, !below && near ? edge : kMaxKey);
  uint32_t lo = ~__reduce_min_sync(0xffffffffu, below && near ? edge : kMaxKey);
  // Bounds stay finite: what they leave out (infinities, NaN) is left to the radix rounds.
  hi = min(hi, kPosInfKey - 1);
  lo = max(min(lo, hi), kNegInfKey + 1);
  if (share > kNearlyAll) {
    const float bottom_edge = key_to_float(lo);
    lo = max(min(lo, order_key(bottom_edge - (key_to_float(hi) - bottom_edge))), kNegInfKey + 1);
  }
  return Bracket{lo, hi, sample.source};
}

template <typename T>
__device__ __forceinline__ Sample sample_of_row(const Task<T>& task) {
  const int n = task.row.n;
  // As few as leave a handful of the top k in each warp: lines of the cache are what a sample costs.
  const int log2_per_thread = n < 1 << 14 ? 0 : n < 3 << 14 ? 1 : n < 1 << 17 ? 2 : n < 1 << 18 ? 3 : 4;
  float rest = 1.0f - __fdividef(static_cast<float>(task.k), static_cast<float>(n));
  for (int i = 0; i < log2_per_thread; ++i) rest *= rest;
  return Sample{greatest_of_row(task, log2_per_thread), 1.0f - rest, kOutsiders, kGuessRowSample};
}

// `outsiders` of a sample of the hint, whose share is but an estimate. `meanwhile` runs when the loads of the
// sample are under way.
template <typename T, typename Meanwhile>
__device__ __forceinline__ Bracket guess(const Task<T>& task, const HintView& hint, uint32_t hinted,
                                         bool use_hint, int outsiders, Meanwhile meanwhile) {
  Sample sample{hinted, hint.alpha, outsiders, kGuessHint};
  // Length first: it is known sooner than alpha. NaN and what is no share count as unknown.
  if (!use_hint || length_reason(task.row.n) != GateReason::kAllowed ||
      !(hint.alpha >= kWorthlessAlpha && hint.alpha <= 1.0f)) {
    sample = sample_of_row(task);
  }
  meanwhile();
  return sample_bracket(task, sample);
}

}  // namespace gvr_topk::cluster
