// The quickest guess: everything about what one step leaves for the next.
//
// Two predictors follow a slot, and the one that was closer of late is gone by. One says that
// the k-th value stands as many standard deviations from the mean of the row's sample as it did: it follows
// rows whose scale or level changes. The other says that the k-th value is what it was, which of rows that
// drift slowly is closer, for a sample adds chance of its own. Each expects what it has seen, averaged, and
// knows how far it was off: a bracket reaches a little further than that.
#pragma once

#include "cluster/moments.cuh"

namespace gvr_topk::cluster {

// `Feedback::place` is a place, so far from this, where the k-th value stands in the row's sample; or it says
// what else is known. From 0 to 1 it is a share of the hint, and a short row's window, or nothing, where
// negative.
constexpr float kPlaceOrigin = 64.0f, kMostPlace = 16.0f;
constexpr float kValueOnly = 96.0f;  // there is a value, but no place
constexpr float kInfinite = 112.0f;  // the k-th value is infinity, or NaN,
constexpr float kMasked = 128.0f;    // or minus infinity
constexpr float kNoFeedback = -1.0f;

__device__ __forceinline__ Feedback nothing() { return Feedback{kNoFeedback, 0.0f, 0.0f, 0}; }

__device__ __forceinline__ bool is_place(float place) {
  return fabsf(place - kPlaceOrigin) <= kMostPlace;  // not of NaN
}

__device__ __forceinline__ bool tells_value(const Feedback& feedback) {
  return is_place(feedback.place) || feedback.place == kValueOnly;
}

// Whether the value alone is gone by, which needs no sample.
__device__ __forceinline__ bool goes_by_value(const Feedback& feedback) {
  return tells_value(feedback) && (feedback.spreads & 1) != 0;
}

// How far off predictions may be, two numbers in the upper halves of their 32 bits: of a place, in deviations
// of the sample for a place at the mean, and as much more for each deviation further out; and of the value.
struct Spreads {
  float place, value;

  __device__ __forceinline__ static Spreads of(const Feedback& feedback) {
    return Spreads{__uint_as_float(feedback.spreads & 0xffff0000u), __uint_as_float(feedback.spreads << 16)};
  }

  // The last bit says which predictor to go by.
  __device__ __forceinline__ uint32_t packed(bool by_value) const {
    const uint32_t both = __byte_perm(__float_as_uint(value), __float_as_uint(place), 0x7632);
    return (both & ~1u) | static_cast<uint32_t>(by_value);
  }
};

// The bracket of the predictor that was closer of late. `Feedback::limit` bounds how far it reaches, in that
// predictor's own unit: where elements are dense, each takes time to list.
__device__ __forceinline__ Bracket predicted(const Moments& moments, const Feedback& feedback) {
  const Spreads spreads = Spreads::of(feedback);
  const bool by_value = (feedback.spreads & 1) != 0;
  float centre = feedback.value, reach = spreads.value;
  if (by_value) {
    reach = fminf(reach, feedback.limit);
  } else if (moments.are_known()) {
    const float z = feedback.place - kPlaceOrigin, spread = fminf(spreads.place, feedback.limit);
    centre = fmaf(z, moments.deviation, moments.mean);
    reach = fmaf(spread, fabsf(z), spread) * moments.deviation;
  }
  return finite_bracket(order_key(centre - reach), order_key(centre + reach),
                        by_value ? kGuessValue : kGuessPlace);
}

// What a predictor goes by. A spread follows how far values turn out from where they were expected: so many
// times as far, and from there by a tenth less with every step. It is not less than `least_of_place`, or than
// leaves so many elements inside of a bracket, and brackets are no wider than leaves so many. What is
// expected moves a part of the way only: most of what moves it is chance.
//
// The constants come of a sweep simulated on the real traces, the paper's layers and Gaussian chains, where a
// miss costs 3 us and a listed element 0.8 ns.
struct Prudence {
  float first_of_place, least_of_place, of_place, of_value, first_inside, least_inside, most_inside;
};
constexpr float kSpreadKept = 0.9f, kCentreMoves = 0.5f;
constexpr Prudence kPrudence{0.05f, 0.016f, 1.6f, 1.3f, 600.0f, 250.0f, 1500.0f};
// Rows with few CTAs take longest to be read again, and have most others to keep waiting.
constexpr Prudence kPrudenceOfFew{0.08f, 0.02f, 2.0f, 1.6f, 900.0f, 600.0f, 3000.0f};
constexpr int kLog2FewCtas = 2;
// Spreads may exceed what brackets are limited to by so much: which predictor is closer is to be seen.
constexpr float kBeyondLimit = 4.0f;
// Of values whose mean is further from zero than so many deviations, sums of squares leave no deviation to
// speak of.
constexpr float kMostOffset = 64.0f;
// Of a value, for each element, where nothing is known of how dense they are.
constexpr float kUnknownDensity = 0x1p-13f;

// What a step leaves. `found` says how many lay inside of `used`, the last bracket: zeros, which are counted
// in any case, say nothing of how dense other elements are.
template <typename T>
__device__ __forceinline__ Feedback left_by(const Task<T>& task, const Moments& moments, uint32_t kth,
                                            const Bracket& used, const Verdict& found) {
  if (kth > kMostFiniteKey) return Feedback{kInfinite, 0.0f, 0.0f, 0};
  if (kth < kLeastFiniteKey) return Feedback{kMasked, 0.0f, 0.0f, 0};
  const Feedback last = task.shared->facts.feedback;
  const Spreads was = Spreads::of(last);
  const Prudence by = task.log2_ctas < kLog2FewCtas ? kPrudenceOfFew : kPrudence;
  const float value = key_to_float(kth);
  const uint32_t inside = found.inside - (used.plateau() == kZeroKey ? found.equal : 0);
  // Half the width of a bracket, for each element that is inside. Of one that is all there is, nothing is to
  // be learnt; the next one tells more.
  const float width = fmaf(fabsf(value), kSpacing<T>, used.high() - used.low());
  const float per_element = width < key_to_float(kMostFiniteKey)
                                ? 0.5f * width * ptx::reciprocal(fmaxf(static_cast<float>(inside), 1.0f))
                                : kUnknownDensity * fabsf(value);
  float limit = by.most_inside * per_element;

  Spreads spreads{0.0f, by.first_inside * per_element};
  float expected = value;
  if (tells_value(last)) {
    const float move = value - last.value;
    spreads.value = fmaxf(kSpreadKept * was.value, by.of_value * fabsf(move));
    expected = fmaf(kCentreMoves, move, last.value);
  }
  spreads.value = fminf(fmaxf(spreads.value, by.least_inside * per_element), kBeyondLimit * limit);

  bool by_value = true;
  float place = kValueOnly;
  if (moments.are_known() && fabsf(moments.mean) <= kMostOffset * moments.deviation) {
    const float z = (value - moments.mean) * ptx::reciprocal(moments.deviation);
    const float further = 1.0f + fabsf(z);
    const float unit = ptx::reciprocal(further * moments.deviation);
    const float limit_of_place = fmaxf(limit * unit, by.least_of_place);
    float centre = z;
    spreads.place = by.first_of_place;
    if (is_place(last.place)) {
      const float move = z - (last.place - kPlaceOrigin);
      spreads.place = fmaxf(kSpreadKept * was.place, by.of_place * fabsf(move) * ptx::reciprocal(further));
      centre = z - (1.0f - kCentreMoves) * move;
    }
    spreads.place = fminf(fmaxf(spreads.place, by.least_of_place), kBeyondLimit * limit_of_place);
    if (fabsf(centre) < kMostPlace) {
      place = kPlaceOrigin + centre;
      by_value = spreads.value * unit <= spreads.place;
      if (!by_value) limit = limit_of_place;
    }
  }
  return Feedback{place, expected, limit, spreads.packed(by_value)};
}

}  // namespace gvr_topk::cluster
