// The interval of keys that is believed to hold the k-th key.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "gvr_topk/params.h"

namespace gvr_topk {

// An inclusive interval of keys.
struct KeyInterval {
  uint32_t lo;
  uint32_t hi;
  uint32_t source;

  __device__ __forceinline__ static KeyInterval everything() {
    return KeyInterval{kMinKey, kMaxKey, kGuessNone};
  }
  __device__ __forceinline__ static KeyInterval only(uint32_t key) {
    return KeyInterval{key, key, kGuessNone};
  }

  // The interval's ends as values, so that scores are compared without conversion to keys. The key just below
  // that of zero belongs to -0.0, and no score has it (order_key). As a value it would equal zero, so zeros
  // would fall into an interval that ends below them; high() therefore steps down by one key.
  __device__ __forceinline__ float low() const { return key_to_float(lo); }
  __device__ __forceinline__ float high() const { return key_to_float(hi == kZeroKey - 1 ? hi - 1 : hi); }

  // The one key inside the interval whose elements are counted instead of listed, because many are expected.
  // This is the only key of a one-key interval, or zero, which ReLU indexers give to most of a row.
  // `kAbsentKey`: there is no such key.
  __device__ __forceinline__ uint32_t tie_key() const {
    if (lo == hi) return lo;
    return lo <= kZeroKey && kZeroKey <= hi ? kZeroKey : kAbsentKey;
  }
};

}  // namespace gvr_topk
