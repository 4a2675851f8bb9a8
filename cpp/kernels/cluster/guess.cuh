// Phase 1, guess: a narrow bracket for the k-th key from a sample of some hundred values.
//
// Of the values hinted by the previous step a share alpha lay at or above that step's k-th value;
// alpha moves slowly, so the k-th value of this step stands near the same place among this step's
// hinted values. Without a usable hint the sample is the row itself, where the share is k / n. Either
// way the bracket is a pair of order statistics around that place, as wide as sampling error wants.
#pragma once

#include "cluster/state.cuh"
#include "common/bin_scan.cuh"

namespace gvr_topk::cluster {

constexpr int kSamplesPerThread = 4;
// A row this much longer than k shows too few of its top k to half of the sample.
constexpr int kLongRow = 1 << 17;
// Of a hint that hit less than this, a sample of the row is worth more.
constexpr float kWorthlessAlpha = 0.1f;
// Of 16 warps' order statistics, those this far from the outside are the bracket: a sign test, missed by
// chance once in 240 times, and wider of itself where neighbours in the hint resemble each other.
constexpr uint32_t kOutsiders = 2;
// Hints that hit nearly always show nothing below the k-th value.
constexpr float kNearlyAll = 0.96f;
// Width of the bracket: sampling error in standard deviations.
constexpr float kSigmas = 3.5f;

constexpr int kHintSamplesPerThread = kHintSamples / kThreads;

struct HintView {
  const int32_t* prior;  // null: no hint
  float alpha;           // negative: unknown
  int offset;
  int32_t sampled[kHintSamplesPerThread];  // this thread's share of the sampled positions
};

// Starts the loads of the hint before anything is known of the row: gathering through them is the
// longest chain of dependent reads in the kernel.
__device__ __forceinline__ HintView hint_view(const TopkParams& p, int slot) {
  HintView hint;
  hint.prior = nullptr;
  hint.alpha = -1.0f;
  hint.offset = p.prior_offset;
  if (slot < 0) return hint;
  hint.prior = p.prior + slot * p.prior_stride;
#pragma unroll
  for (int i = 0; i < kHintSamplesPerThread; ++i) {
    const uint32_t s = i * kThreads + threadIdx.x;
    // Evenly spaced over a long hint, all of a short one.
    const uint32_t at = p.k > kHintSamples ? s * static_cast<uint32_t>(p.k) / kHintSamples : s;
    hint.sampled[i] = at < static_cast<uint32_t>(p.k) ? hint.prior[at] : -1;
  }
  const float alpha = p.guess_state != nullptr ? p.guess_state[slot] : -1.0f;
  // Written so that NaN counts as unknown.
  if (alpha >= 0.0f && alpha <= 1.0f) hint.alpha = alpha;
  return hint;
}

template <typename T>
__device__ __forceinline__ uint32_t hinted_key(const Task<T>& task, const HintView& hint, int32_t position) {
  // Padding is recognised before the offset: -1 + 1 is not position 0.
  return position < 0 ? kAbsentKey : task.row.key_or_absent(static_cast<int64_t>(position) + hint.offset);
}

// Keys of this thread's sampled positions. Gathered even when the guess does without them: from them
// comes the alpha of the next step.
template <typename T>
__device__ __forceinline__ void gather_hint(const Task<T>& task, const HintView& hint,
                                            uint32_t (&hinted)[kHintSamplesPerThread]) {
#pragma unroll
  for (int i = 0; i < kHintSamplesPerThread; ++i) {
    hinted[i] = hint.prior != nullptr ? hinted_key(task, hint, hint.sampled[i]) : kAbsentKey;
  }
}

template <typename T>
__device__ __forceinline__ void sample_row(const Task<T>& task, uint32_t (&sample)[kSamplesPerThread]) {
#pragma unroll
  for (int i = 0; i < kSamplesPerThread; ++i) {
    sample[i] = kAbsentKey;
    if (i >= kSamplesPerThread / 2 && task.row.n < kLongRow) continue;
    const uint32_t s = i * kThreads + threadIdx.x;
    // One position in each stratum; the multiplicative hash keeps periodic rows from hiding.
    const uint64_t place = (static_cast<uint64_t>(s) << 32) + s * 2654435761u;
    const int log2_strata = kLog2Threads + (task.row.n < kLongRow ? 1 : 2);
    sample[i] =
        task.row.key(static_cast<int>((place * static_cast<uint32_t>(task.row.n)) >> (32 + log2_strata)));
  }
}

// Two units in the last place are plenty here, and the exact root is a subroutine.
__device__ __forceinline__ float fast_sqrt(float x) { return x > 0.0f ? x * rsqrtf(x) : 0.0f; }

// One warp reads the bracket off the histogram of the sample, whose bin b starts at floor + b * width.
template <typename T>
__device__ __forceinline__ Bracket order_statistics(const Task<T>& task, float floor, float width,
                                                    uint32_t count, float share) {
  const BinScan scan(task.shared->bins, task.lane);
  const float total = static_cast<float>(count);
  const float middle = share * total;
  const float reach = kSigmas * fast_sqrt(middle * (1.0f - share)) + 2.0f;
  const int first = static_cast<int>(middle - reach);
  const int last = static_cast<int>(middle + reach) + 1;
  uint32_t hi = kPosInfKey;
  float top_edge = floor + 256 * width;
  if (first >= 1) {
    top_edge = floor + static_cast<float>(scan.locate(first).bin + 1) * width;
    hi = order_key(top_edge);
  }
  float bottom_edge;
  if (last <= static_cast<int>(count)) {
    bottom_edge = floor + static_cast<float>(scan.locate(last).bin) * width;
  } else {
    // The place is so near the sample's minimum that the bracket must reach below it: as far below
    // the middle as its top is above.
    const uint32_t rank = min(count, static_cast<uint32_t>(middle) + 1);
    const float center = floor + static_cast<float>(scan.locate(rank).bin) * width;
    bottom_edge = center - (top_edge - center) - width;
  }
  // Bounds stay finite: what they leave out (infinities, NaN) is left to the radix rounds.
  hi = min(hi, kPosInfKey - 1);
  const uint32_t lo = max(kNegInfKey + 1, order_key(bottom_edge));
  return Bracket{min(lo, hi), hi, kGuessNone};
}

// Order statistics of the sample around `share` (of the sample, from the top); three block barriers.
template <typename T, int kSamples>
__device__ __forceinline__ Bracket sample_bracket(const Task<T>& task, const uint32_t (&sample)[kSamples],
                                                  float share, uint32_t source) {
  Shared& sm = *task.shared;
  uint32_t lowest = kMaxKey, highest = kAbsentKey, count = 0;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    if (sample[i] == kAbsentKey) continue;
    lowest = min(lowest, sample[i]);
    highest = max(highest, sample[i]);
    ++count;
  }
  lowest = __reduce_min_sync(0xffffffffu, lowest);
  highest = __reduce_max_sync(0xffffffffu, highest);
  count = __reduce_add_sync(0xffffffffu, count);
  if (task.lane == 0) {
    sm.warp_value[0][task.warp] = lowest;
    sm.warp_value[1][task.warp] = highest;
    sm.warp_value[2][task.warp] = count;
  }
  if (threadIdx.x < 256) sm.bins[threadIdx.x] = 0;
  __syncthreads();
  const int w = task.lane % kWarps;
  lowest = __reduce_min_sync(0xffffffffu, sm.warp_value[0][w]);
  highest = __reduce_max_sync(0xffffffffu, sm.warp_value[1][w]);
  count = __reduce_add_sync(0xffffffffu, task.lane < kWarps ? sm.warp_value[2][w] : 0);
  if (count == 0) return Bracket{kZeroKey, kZeroKey, source};

  const float floor = key_to_float(lowest);
  const float width = (key_to_float(highest) - floor) * (1.0f / 256);
  const float scale = __fdividef(1.0f, width);
#pragma unroll
  for (int i = 0; i < kSamples; ++i) {
    if (sample[i] == kAbsentKey) continue;
    // A NaN place (equal or non-finite values) converts to bin 0: a useless bracket, not a wrong one.
    const int bin = static_cast<int>((key_to_float(sample[i]) - floor) * scale);
    atomicAdd(&sm.bins[min(max(bin, 0), 255)], 1u);
  }
  __syncthreads();
  if (task.warp == 0) {
    const Bracket bracket = order_statistics(task, floor, width, count, share);
    if (task.lane == 0) sm.bracket = bracket;
  }
  __syncthreads();
  return Bracket{sm.bracket.lo, sm.bracket.hi, source};
}

// How many of 4 * kVecs keys are greater than this one.
template <int kVecs>
__device__ __forceinline__ uint32_t rank_among(const uint4* keys, uint32_t mine) {
  uint32_t rank = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint4 other = keys[i];
    rank += (other.x > mine) + (other.y > mine) + (other.z > mine) + (other.w > mine);
  }
  return rank;
}

// A bracket around the (1 - alpha) quantile of the hinted values. Each warp reads the two order
// statistics beside that place off its own 32 values; the bracket reaches from the third lowest of the
// lower ones to the third highest of the upper ones. One block barrier.
template <typename T>
__device__ __forceinline__ Bracket hint_bracket(const Task<T>& task, uint32_t hinted, float alpha) {
  Shared& sm = *task.shared;
  reinterpret_cast<uint32_t*>(sm.sample)[threadIdx.x] = hinted;
  __syncwarp();
  const uint32_t rank = rank_among<8>(sm.sample + 8 * task.warp, hinted);
  const int present = __popc(__ballot_sync(0xffffffffu, hinted != kAbsentKey));
  const float place = alpha * static_cast<float>(present);
  const int upper = static_cast<int>(place) - 1;
  const int lower = min(static_cast<int>(ceilf(place)), present - 1);
  // The r-th largest is the smallest key with no more than r greater ones.
  const uint32_t top = __reduce_min_sync(0xffffffffu, static_cast<int>(rank) <= upper ? hinted : kMaxKey);
  const uint32_t bottom = __reduce_min_sync(0xffffffffu, static_cast<int>(rank) <= lower ? hinted : kMaxKey);
  if (task.lane == 0) {
    sm.edge[0][task.warp] = top;
    sm.edge[1][task.warp] = ~bottom;
  }
  __syncthreads();
  const int side = task.lane / kWarps;
  const uint32_t edge = sm.edge[side][task.lane % kWarps];
  const bool near = rank_among<kWarps / 4>(reinterpret_cast<const uint4*>(sm.edge[side]), edge) <=
                    (side == 1 && alpha > kNearlyAll ? 0 : kOutsiders);
  uint32_t hi = __reduce_min_sync(0xffffffffu, side == 0 && near ? edge : kMaxKey);
  uint32_t lo = ~__reduce_min_sync(0xffffffffu, side == 1 && near ? edge : kMaxKey);
  // Bounds stay finite: what they leave out (infinities, NaN) is left to the radix rounds.
  hi = min(hi, kPosInfKey - 1);
  lo = max(min(lo, hi), kNegInfKey + 1);
  if (alpha > kNearlyAll) {
    const float bottom_edge = key_to_float(lo);
    lo = max(min(lo, order_key(bottom_edge - (key_to_float(hi) - bottom_edge))), kNegInfKey + 1);
  }
  return Bracket{min(lo, hi), hi, kGuessHint};
}

template <typename T>
__device__ __forceinline__ Bracket guess_from_row(const Task<T>& task) {
  uint32_t sample[kSamplesPerThread];
  sample_row(task, sample);
  const float share = static_cast<float>(task.k) / static_cast<float>(task.row.n);
  return sample_bracket(task, sample, share, kGuessRowSample);
}

template <typename T>
__device__ __forceinline__ Bracket guess(const Task<T>& task, const HintView& hint,
                                         const uint32_t (&hinted)[kHintSamplesPerThread]) {
  const bool useful = hint.alpha >= kWorthlessAlpha && length_reason(task.row.n) == GateReason::kAllowed;
  if (!useful) return guess_from_row(task);
  return hint_bracket(task, hinted[0], hint.alpha);
}

}  // namespace gvr_topk::cluster
