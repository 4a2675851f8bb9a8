// The quickest guess: everything about what one step leaves for the next.
//
// Two predictors follow a slot, and the one that was closer of late is gone by. One says that
// the k-th value stands as many standard deviations from the mean of the row's sample as it did: it follows
// rows whose scale or level changes. The other says that the k-th value is what it was, which of rows that
// drift slowly is closer, for a sample adds chance of its own. Each expects what it has seen, averaged, and
// knows how far it was off: a bracket reaches a little further than that.
#pragma once

#include "core/moments.cuh"
#include "core/step_state.cuh"

namespace gvr_topk {

// How far off predictions may be, two numbers in the upper halves of their 32 bits: of a place, in deviations
// of the sample for a place at the mean, and as much more for each deviation further out; and of the value.
struct PredictionErrors {
  float z_score, value;

  __device__ __forceinline__ static PredictionErrors of(const StepState& state) {
    return PredictionErrors{__uint_as_float(state.packed_errors & 0xffff0000u),
                            __uint_as_float(state.packed_errors << 16)};
  }

  // The last bit says which predictor to go by.
  __device__ __forceinline__ uint32_t packed(bool by_value) const {
    const uint32_t both = __byte_perm(__float_as_uint(value), __float_as_uint(z_score), 0x7632);
    return (both & ~1u) | static_cast<uint32_t>(by_value);
  }
};

// The bracket of the predictor that was closer of late. `StepState::limit` bounds how far it reaches, in that
// predictor's own unit: where elements are dense, each takes time to list.
__device__ __forceinline__ KeyInterval predicted(const Moments& moments, const StepState& state) {
  const PredictionErrors errors = PredictionErrors::of(state);
  const bool by_value = (state.packed_errors & 1) != 0;
  float centre = state.value, half_width = errors.value;
  if (by_value) {
    half_width = fminf(half_width, state.limit);
  } else if (moments.are_known()) {
    const float z = state.z_score - kStateZScoreOrigin, error = fminf(errors.z_score, state.limit);
    centre = fmaf(z, moments.deviation, moments.mean);
    half_width = fmaf(error, fabsf(z), error) * moments.deviation;
  }
  return finite_interval(order_key(centre - half_width), order_key(centre + half_width),
                         by_value ? kGuessValue : kGuessZScore);
}

// What a predictor goes by. A spread follows how far values turn out from where they were expected: so many
// times as far, and from there by a tenth less with every step. It is not less than `min_z_error`, or than
// leaves so many elements inside of a bracket, and brackets are no wider than leaves so many. What is
// expected moves a part of the way only: most of what moves it is chance.
//
// The constants come of a sweep simulated on the real traces, the paper's layers and Gaussian chains, where a
// miss costs 3 us and a listed element 0.8 ns.
struct PredictorTuning {
  float first_z_error, min_z_error, z_factor, value_factor, first_inside, min_inside, max_inside;
};
constexpr float kSpreadKept = 0.9f, kCentreMoves = 0.5f;
constexpr PredictorTuning kTuning{0.05f, 0.016f, 1.6f, 1.3f, 600.0f, 250.0f, 1500.0f};
// Rows with few CTAs take longest to be read again, and have most others to keep waiting.
constexpr PredictorTuning kTuningFewCtas{0.08f, 0.02f, 2.0f, 1.6f, 900.0f, 600.0f, 3000.0f};
constexpr int kLog2FewCtas = 2;
// Spreads may exceed what brackets are limited to by so much: which predictor is closer is to be seen.
constexpr float kBeyondLimit = 4.0f;
// Of values whose mean is further from zero than so many deviations, sums of squares leave no deviation to
// speak of.
constexpr float kMostOffset = 64.0f;
// Of a value, for each element, where nothing is known of how dense they are.
constexpr float kUnknownDensity = 0x1p-13f;

// What a step leaves. `result` says how many lay inside of `interval`, the last bracket: zeros, which are
// counted in any case, say nothing of how dense other elements are.
template <typename T>
__device__ __forceinline__ StepState next_state(const RowContext<T>& ctx, const Moments& moments,
                                                uint32_t kth, const KeyInterval& interval,
                                                const CountResult& result) {
  if (kth > kMostFiniteKey) return StepState{kStateInfinite, 0.0f, 0.0f, 0};
  if (kth < kLeastFiniteKey) return StepState{kStateMasked, 0.0f, 0.0f, 0};
  const StepState last = ctx.shared->facts.state;
  const PredictionErrors was = PredictionErrors::of(last);
  const PredictorTuning by = ctx.log2_ctas < kLog2FewCtas ? kTuningFewCtas : kTuning;
  const float value = key_to_float(kth);
  const uint32_t inside = result.inside - (interval.tie_key() == kZeroKey ? result.equal : 0);
  // Half the width of a bracket, for each element that is inside. Of one that is all there is, nothing is to
  // be learnt; the next one tells more.
  const float width = fmaf(fabsf(value), kEpsilon<T>, interval.high() - interval.low());
  const float per_element = width < key_to_float(kMostFiniteKey)
                                ? 0.5f * width * ptx::reciprocal(fmaxf(static_cast<float>(inside), 1.0f))
                                : kUnknownDensity * fabsf(value);
  float limit = by.max_inside * per_element;

  PredictionErrors errors{0.0f, by.first_inside * per_element};
  float expected = value;
  if (has_value(last)) {
    const float move = value - last.value;
    errors.value = fmaxf(kSpreadKept * was.value, by.value_factor * fabsf(move));
    expected = fmaf(kCentreMoves, move, last.value);
  }
  errors.value = fminf(fmaxf(errors.value, by.min_inside * per_element), kBeyondLimit * limit);

  bool by_value = true;
  float z_score = kStateValueOnly;
  if (moments.are_known() && fabsf(moments.mean) <= kMostOffset * moments.deviation) {
    const float z = (value - moments.mean) * ptx::reciprocal(moments.deviation);
    const float further = 1.0f + fabsf(z);
    const float unit = ptx::reciprocal(further * moments.deviation);
    const float z_limit = fmaxf(limit * unit, by.min_z_error);
    float centre = z;
    errors.z_score = by.first_z_error;
    if (is_z_score(last.z_score)) {
      const float move = z - (last.z_score - kStateZScoreOrigin);
      errors.z_score = fmaxf(kSpreadKept * was.z_score, by.z_factor * fabsf(move) * ptx::reciprocal(further));
      centre = z - (1.0f - kCentreMoves) * move;
    }
    errors.z_score = fminf(fmaxf(errors.z_score, by.min_z_error), kBeyondLimit * z_limit);
    if (fabsf(centre) < kStateMaxZScore) {
      z_score = kStateZScoreOrigin + centre;
      by_value = errors.value * unit <= errors.z_score;
      if (!by_value) limit = z_limit;
    }
  }
  return StepState{z_score, expected, limit, errors.packed(by_value)};
}

}  // namespace gvr_topk
