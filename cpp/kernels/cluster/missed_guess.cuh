// Draws conclusions from the counts of an interval that has missed: which range holds the k-th key, and which
// interval to try next.
#pragma once

#include <cstdint>

#include "cluster/counts.cuh"
#include "cluster/row_context.cuh"
#include "ptx/math.cuh"

namespace gvr_topk {

// Moves an interval that has just missed, for a second pass. If the interval was too low, the new interval is
// everything finite above it, unless more elements lie there than half the list's capacity. If the interval
// was too high, the new one lies directly below it. Its lower end is extrapolated from the counts at the two
// old ends, on the assumption of an exponential tail, and then moved further down by a margin, because
// another miss would cost another read.
//
// Returns false if neither is likely to hold the k-th key; radix rounds decide then. All CTAs have the same
// counts, and so the same interval.
template <typename T>
__device__ __forceinline__ bool move_interval(const RowContext<T>& ctx, const CountResult& result,
                                              KeyInterval& missed) {
  KeyInterval interval = missed;
  const uint32_t k = ctx.k, capacity = static_cast<uint32_t>(ctx.list.segment() << ctx.log2_ctas) / 2;
  if (!result.agreed || result.contains_k) return false;
  if (result.above >= k) {
    if (result.above > capacity) return false;
    interval.lo = interval.hi + 1;
    interval.hi = kMostFiniteKey;
  } else {
    const uint32_t reached = result.above + result.inside;  // elements at or above the interval's lower end
    const uint32_t requested = k + (k - reached) + k / 6;
    if (result.inside == 0 || requested - reached > capacity) return false;
    const float lo = interval.low(), hi = interval.high();
    const float per_fold =
        ptx::log2(__fdividef(static_cast<float>(reached), fmaxf(static_cast<float>(result.above), 0.5f)));
    const float folds = ptx::log2(__fdividef(static_cast<float>(requested), static_cast<float>(reached)));
    interval.hi = interval.lo - 1;
    interval.lo = max(kLeastFiniteKey, order_key(lo - (hi - lo) * __fdividef(folds, per_fold)));
  }
  const bool is_sound = kNegInfKey < interval.lo && interval.lo <= interval.hi && interval.hi < kPosInfKey;
  if (is_sound) missed = interval;
  return is_sound;
}

// Returns whether the counts of an interval show that the k-th value is -inf: fewer than k elements are
// greater than -inf.
__device__ __forceinline__ bool is_masked(const KeyInterval& interval, const CountResult& result, int k) {
  return interval.lo == kLeastFiniteKey && result.above + result.inside < static_cast<uint32_t>(k);
}

// Returns the range of keys that holds the k-th key, according to the counts of an interval that missed. All
// CTAs must have agreed on the counts.
__device__ __forceinline__ KeyInterval range_of(const CountResult& result, const KeyInterval& interval,
                                                int k) {
  if (result.contains_k) return interval;
  if (result.above >= static_cast<uint32_t>(k)) return KeyInterval{interval.hi + 1, kMaxKey, kGuessNone};
  return KeyInterval{kMinKey, interval.lo - 1, kGuessNone};
}

}  // namespace gvr_topk
