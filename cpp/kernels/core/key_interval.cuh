// The interval of keys that is believed to hold the k-th key, and what CTAs count and tell each other about
// it.
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

  // The ends as values, so that scores are compared without conversion to keys. The key just below that of
  // zero belongs to -0.0, which no score keeps: as a value it would equal zero, and zeros would fall into an
  // interval that ends below them.
  __device__ __forceinline__ float low() const { return key_to_float(lo); }
  __device__ __forceinline__ float high() const { return key_to_float(hi == kZeroKey - 1 ? hi - 1 : hi); }

  // The one key inside the interval whose elements are counted and not listed, because many are expected: the
  // only key of a one-key interval, or zero, which ReLU indexers give to most of a row. `kAbsentKey`: none.
  __device__ __forceinline__ uint32_t tie_key() const {
    if (lo == hi) return lo;
    return lo <= kZeroKey && kZeroKey <= hi ? kZeroKey : kAbsentKey;
  }
};

// What one CTA has counted in its part of the row.
struct Counts {
  uint32_t above;   // elements above the interval
  uint32_t listed;  // elements inside it other than those of the tie key; may exceed the list's capacity
  uint32_t equal;   // elements equal to the tie key
};

// What a CTA tells all others. Each CTA reads the row's length and guesses the interval for itself, from
// memory that another stream may be writing. So length and interval travel with the counts, which are added
// only where all CTAs agree.
struct alignas(16) Header {
  Counts counts;
  int32_t length;
  uint32_t lo;
  uint32_t hi;
  uint32_t unused[2];
};
constexpr int kHeaderVecs = sizeof(Header) / sizeof(uint4);
static_assert(kHeaderVecs == 2);

// What the headers of a cluster say together. All CTAs have the same headers and so the same result, but for
// `above_before` and `collected`.
struct CountResult {
  bool agreed;            // All CTAs used the same length and interval.
  bool contains_k;        // They agreed, and the k-th key lies in the interval.
  bool complete;          // The k-th key lies in the interval, and every CTA's list had room.
  uint32_t above;         // elements above the interval
  uint32_t above_before;  // those of them in earlier CTAs
  uint32_t rank;          // rank of the k-th key from the top, among the elements inside
  uint32_t inside;        // elements inside the interval
  uint32_t equal;         // those of them that equal the tie key
  uint32_t collected;     // Candidates of this CTA. More than the capacity means that none were collected.
};

// What all CTAs of a cluster know of a row whose guessed interval has missed: the later stages start from it.
struct MissedGuess {
  KeyInterval interval;   // the last one tried
  CountResult result;     // its counts, on which all CTAs agreed
  int passes;             // counting passes so far, each with one exchange
  int length;             // of the row
  int elements;           // by which the row was spread over registers
  float mean, deviation;  // of the row's sample
  uint32_t source;        // of the first guess
};

}  // namespace gvr_topk
