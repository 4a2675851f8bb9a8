// The counts of an interval of keys that the CTAs of a cluster exchange, and their sums.
#pragma once

#include <cstdint>

#include "core/key_range.cuh"

namespace gvr_topk {

// The counts of one CTA in its part of the row.
struct Counts {
  uint32_t above;   // elements above the interval
  uint32_t listed;  // elements inside it other than those of the tie key; may exceed the list's capacity
  uint32_t equal;   // elements equal to the tie key
};

// The header that a CTA sends to all others. Each CTA reads the row's length and guesses the interval for
// itself, from memory that another stream may be writing. So the length and the interval travel with the
// counts, and counts are added only if all CTAs agree on both.
struct alignas(16) Header {
  Counts counts;
  int32_t length;
  uint32_t lo;
  uint32_t hi;
  uint32_t unused[2];
};
constexpr int kHeaderVecs = sizeof(Header) / sizeof(uint4);
static_assert(kHeaderVecs == 2);

// The combined headers of a cluster. All CTAs have the same headers and so the same result, except for
// `above_before` and `collected`.
struct CountResult {
  bool agreed;            // All CTAs used the same length and interval.
  bool contains_k;        // All CTAs agreed, and the k-th key lies in the interval.
  bool complete;          // `contains_k` holds, and every CTA's list had room.
  uint32_t above;         // elements above the interval
  uint32_t above_before;  // elements above the interval in earlier CTAs
  uint32_t rank;          // rank of the k-th key from the top, among the elements inside
  uint32_t inside;        // elements inside the interval
  uint32_t equal;         // elements inside that equal the tie key
  uint32_t collected;     // Candidates of this CTA. If they exceed the capacity, none were collected.
};

// Everything that all CTAs of a cluster know about a row whose guessed interval has missed. The later stages
// start from it.
struct MissedGuess {
  KeyInterval interval;   // the last one tried
  CountResult result;     // its counts, on which all CTAs agreed
  int passes;             // counting passes so far, each with one exchange
  int length;             // length of the row
  int elements;           // length for which the row was laid out over registers
  float mean, deviation;  // moments of the row's sample
  uint32_t source;        // `GuessSource` of the first guess
};

}  // namespace gvr_topk
