// Intervals of keys, and the arithmetic of radix rounds: a range of keys, its division into bins of equal
// width, the counts of keys in these, and the narrowing to one bin for the next round; and where to look for
// the k-th key if an interval has missed it.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "gvr_topk/params.h"
#include "ptx/warp.cuh"

namespace gvr_topk {

struct KeyRange {
  uint32_t base;
  uint32_t length;  // distance from `base` to the last key

  // Bins of the range are 2^shift keys wide. With this shift at most 2^kLog2Bins bins cover the range.
  template <int kLog2Bins>
  GVR_DEVICE int shift() const {
    return max(0, 32 - kLog2Bins - __clz(length));
  }

  // Unsigned wrap: the distance of a key below the base exceeds every length.
  GVR_DEVICE bool contains(uint32_t key) const { return key - base <= length; }

  GVR_DEVICE uint32_t bin(uint32_t key, int shift) const { return (key - base) >> shift; }

  // Narrows the range to one of its bins.
  GVR_DEVICE void narrow(uint32_t bin, int shift) {
    const uint32_t offset = bin << shift;
    base += offset;
    length = min(length - offset, (1u << shift) - 1);
  }
};

// The bins of one round, and the number of this thread's keys that lie above the range of the round.
struct RadixBins {
  uint32_t* hist;
  KeyRange range;
  int shift;
  uint32_t above = 0;

  GVR_DEVICE void add(uint32_t key) {
    ptx::count_if_greater(above, key, range.base + range.length);
    if (range.contains(key)) atomicAdd(&hist[range.bin(key, shift)], 1u);
  }
};

// An inclusive interval of keys.
struct KeyInterval {
  uint32_t lo;
  uint32_t hi;
  uint32_t source;

  GVR_DEVICE static KeyInterval everything() { return KeyInterval{kMinKey, kMaxKey, kGuessNone}; }
  GVR_DEVICE static KeyInterval only(uint32_t key) { return KeyInterval{key, key, kGuessNone}; }

  // The interval's ends as values, so that scores are compared without conversion to keys. The key just below
  // that of zero belongs to -0.0, and no score has it (order_key). As a value it would equal zero, so zeros
  // would fall into an interval that ends below them; high() therefore steps down by one key.
  GVR_DEVICE float low() const { return key_to_float(lo); }
  GVR_DEVICE float high() const { return key_to_float(hi == kZeroKey - 1 ? hi - 1 : hi); }

  // The one key inside the interval whose elements are counted instead of listed, because many are expected.
  // This is the only key of a one-key interval, or zero, which ReLU indexers give to most of a row.
  // `kAbsentKey`: there is no such key.
  GVR_DEVICE uint32_t tie_key() const {
    if (lo == hi) return lo;
    return lo <= kZeroKey && kZeroKey <= hi ? kZeroKey : kAbsentKey;
  }
};

// Moves an interval of keys that `above` elements of a row lie above, and `inside` elements in, for another
// pass whose list holds `capacity` elements.
//
// If the interval was too low, the new one is everything finite above it, unless that is too much. If it was
// too high, the new one lies directly below it. If it holds the k-th key, and too many others, the new one is
// a part of it. Ends that no count is known of are interpolated or extrapolated from the counts at the two
// old ends, on the assumption of an exponential tail, and then moved further by a margin that leaves room in
// the list, because another miss would cost another read.
//
// Returns false, and moves nothing, if the new interval is not likely to hold the k-th key.
GVR_DEVICE bool move_by_counts(uint32_t above, uint32_t inside, uint32_t k, uint32_t capacity,
                               KeyInterval& missed) {
  KeyInterval interval = missed;
  const uint32_t reached = above + inside;  // elements at or above the interval's lower end
  // The key that so many elements reach.
  const auto key_of = [&](uint32_t count) {
    const float lo = missed.low(), hi = missed.high();
    const float per_fold =
        ptx::log2(__fdividef(static_cast<float>(reached), fmaxf(static_cast<float>(above), 0.5f)));
    const float folds = ptx::log2(__fdividef(static_cast<float>(count), static_cast<float>(reached)));
    return order_key(lo - (hi - lo) * __fdividef(folds, per_fold));
  };
  interval.source = kGuessNone;  // The new ends are not a sample's.
  if (above >= k) {
    if (above > capacity) return false;
    interval.lo = interval.hi + 1;
    interval.hi = kMostFiniteKey;
  } else if (reached < k) {
    const uint32_t requested = k + (k - reached) + min(k / 6, capacity / 2);
    if (inside == 0 || requested - reached > capacity) return false;
    interval.hi = interval.lo - 1;
    interval.lo = max(kLeastFiniteKey, key_of(requested));
  } else {
    const uint32_t share = 3 * (capacity / 8);  // of the list, for each side of the k-th key
    if (k + share < reached) interval.lo = key_of(k + share);
    if (k > above + share) interval.hi = key_of(k - share);
    if (interval.lo == missed.lo && interval.hi == missed.hi) return false;
  }
  const bool is_sound = kNegInfKey < interval.lo && interval.lo <= interval.hi && interval.hi < kPosInfKey;
  if (is_sound) missed = interval;
  return is_sound;
}

}  // namespace gvr_topk
