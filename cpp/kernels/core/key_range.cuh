// Intervals of keys, and the arithmetic of radix rounds: a range of keys, its division into bins of equal
// width, the counts of keys in these, and the narrowing to one bin for the next round.
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

}  // namespace gvr_topk
