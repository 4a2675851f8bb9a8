// Predicts the k-th value from the state of a slot, and makes the state for the next step.
//
// Two predictors follow each slot, and the one with the smaller recent error is used. The z-score predictor
// assumes that the k-th value stays the same number of standard deviations away from the mean of the row's
// sample. It follows rows whose scale or level changes. The value predictor assumes that the k-th value
// itself stays the same. It is better on rows that drift slowly, because a sample adds noise of its own. Each
// predictor predicts the average of the values that it has seen and keeps track of its error. The interval is
// a little wider than that error.
#pragma once

#include "cluster/moments.cuh"
#include "cluster/step_state.cuh"

namespace gvr_topk {

// The errors of both predictors, packed as the upper halves of two floats. The error of the z-score is in
// standard deviations of the sample and holds at a z-score of 0. It grows by the same amount again for each
// standard deviation further out.
struct PredictionErrors {
  float z_score, value;

  GVR_DEVICE static PredictionErrors of(const StepState& state) {
    return PredictionErrors{__uint_as_float(state.packed_errors & 0xffff0000u),
                            __uint_as_float(state.packed_errors << 16)};
  }

  // The lowest bit says which predictor is in use.
  GVR_DEVICE uint32_t packed(bool by_value) const {
    const uint32_t both = __byte_perm(__float_as_uint(value), __float_as_uint(z_score), 0x7632);
    return (both & ~1u) | static_cast<uint32_t>(by_value);
  }
};

// The interval of the predictor in use. `StepState::limit` bounds its half-width, in that predictor's own
// unit, because each element inside takes time to list.
GVR_DEVICE KeyInterval predicted_interval(const Moments& moments, const StepState& state) {
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

// Constants of the predictors. An error estimate rises at once to `z_factor` or `value_factor` times the last
// error, and decays by a tenth per step. It stays above `min_z_error`, and above the half-width of an
// interval that holds `min_inside` elements. An interval is at most as wide as one that holds `max_inside`
// elements. A prediction moves only part of the way to the newest value, because most of a change is noise.
//
// The constants come from a sweep simulated on real traces, the paper's layers and Gaussian chains. In the
// simulation a miss costs 3 us and a listed element 0.8 ns.
struct PredictorTuning {
  float first_z_error, min_z_error, z_factor, value_factor, first_inside, min_inside, max_inside;
};
constexpr float kErrorDecay = 0.9f, kCentreStep = 0.5f;
constexpr PredictorTuning kTuning{0.05f, 0.016f, 1.6f, 1.3f, 600.0f, 250.0f, 1500.0f};
// Rows with few CTAs take longest to be read again, and most other rows wait behind them.
constexpr PredictorTuning kTuningFewCtas{0.08f, 0.02f, 2.0f, 1.6f, 900.0f, 600.0f, 3000.0f};
constexpr int kLog2FewCtas = 2;
// Error estimates may exceed the limit of intervals by this factor, so that the estimates still show which
// predictor is better.
constexpr float kBeyondLimit = 4.0f;
// If |mean| exceeds this many standard deviations, the variance is lost to cancellation.
constexpr float kMaxOffsetSigmas = 64.0f;
// Half-width per element, relative to the value, for rows whose density of elements is unknown.
constexpr float kUnknownDensity = 0x1p-13f;

// The state for the next step. `interval` is the last interval tried, and `result` holds its counts. Zeros
// are counted instead of listed in any interval that holds them, and say nothing about the density of other
// elements, so they are left out of `inside`.
template <typename T>
GVR_DEVICE StepState next_state(const RowContext<T>& ctx, const Moments& moments, uint32_t kth,
                                const KeyInterval& interval, const CountResult& result) {
  if (kth > kMostFiniteKey) return StepState{kStateInfinite, 0.0f, 0.0f, 0};
  if (kth < kLeastFiniteKey) return StepState{kStateMasked, 0.0f, 0.0f, 0};
  const StepState last = ctx.shared->facts.state;
  const PredictionErrors last_errors = PredictionErrors::of(last);
  const PredictorTuning tuning = ctx.log2_ctas < kLog2FewCtas ? kTuningFewCtas : kTuning;
  const float value = key_to_float(kth);
  const uint32_t inside = result.inside - (interval.tie_key() == kZeroKey ? result.equal : 0);
  // Half-width of the interval per element inside. An interval of all finite values says nothing about the
  // density. The next interval will.
  const float width = fmaf(fabsf(value), kEpsilon<T>, interval.high() - interval.low());
  const float per_element = width < key_to_float(kMostFiniteKey)
                                ? 0.5f * width * ptx::reciprocal(fmaxf(static_cast<float>(inside), 1.0f))
                                : kUnknownDensity * fabsf(value);
  float limit = tuning.max_inside * per_element;

  PredictionErrors errors{0.0f, tuning.first_inside * per_element};
  float expected = value;
  if (has_value(last)) {
    const float move = value - last.value;
    errors.value = fmaxf(kErrorDecay * last_errors.value, tuning.value_factor * fabsf(move));
    expected = fmaf(kCentreStep, move, last.value);
  }
  errors.value = fminf(fmaxf(errors.value, tuning.min_inside * per_element), kBeyondLimit * limit);

  bool by_value = true;
  float z_score = kStateValueOnly;
  if (moments.are_known() && fabsf(moments.mean) <= kMaxOffsetSigmas * moments.deviation) {
    const float z = (value - moments.mean) * ptx::reciprocal(moments.deviation);
    const float further = 1.0f + fabsf(z);
    const float unit = ptx::reciprocal(further * moments.deviation);
    const float z_limit = fmaxf(limit * unit, tuning.min_z_error);
    float centre = z;
    errors.z_score = tuning.first_z_error;
    if (is_z_score(last.z_score)) {
      const float move = z - (last.z_score - kStateZScoreOrigin);
      errors.z_score =
          fmaxf(kErrorDecay * last_errors.z_score, tuning.z_factor * fabsf(move) * ptx::reciprocal(further));
      centre = z - (1.0f - kCentreStep) * move;
    }
    errors.z_score = fminf(fmaxf(errors.z_score, tuning.min_z_error), kBeyondLimit * z_limit);
    if (fabsf(centre) < kStateMaxZScore) {
      z_score = kStateZScoreOrigin + centre;
      by_value = errors.value * unit <= errors.z_score;
      if (!by_value) limit = z_limit;
    }
  }
  return StepState{z_score, expected, limit, errors.packed(by_value)};
}

}  // namespace gvr_topk
