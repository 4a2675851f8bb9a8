// The state that one decoding step leaves for the next: 16 bytes in the slot of a request.
#pragma once

#include <cstdint>

#include "core/config.cuh"
#include "gvr_topk/params.h"
#include "ptx/memory.cuh"

namespace gvr_topk {

// `z_score` also tells the kinds of state apart:
// - 48 to 80: kStateZScoreOrigin plus the z-score of the k-th value in a sample of the row; `value` is valid
//   too.
// - kStateValueOnly: only `value` is valid.
// - kStateInfinite: the k-th value was infinity or NaN.
// - kStateMasked: the k-th value was -inf.
// - 0 to 1: the share of hinted values that were at or above the k-th value.
// - kStateUnknown (-1): nothing is known.
// - Other negative numbers: the packed window of a short row (small_row/value_window.cuh).
struct alignas(16) StepState {
  float z_score;
  float value;             // the k-th value that the next step expects
  float limit;             // largest half-width of the next interval, in the unit of the predictor in use
  uint32_t packed_errors;  // `PredictionErrors`; its lowest bit says that the value predictor is in use
};
static_assert(sizeof(StepState) == sizeof(float4) && sizeof(StepState) == kStateFloats * sizeof(float));

// Stores a state if `condition`, without a branch.
GVR_DEVICE void store_state_if(bool condition, StepState* at, const StepState& state) {
  const float errors = __uint_as_float(state.packed_errors);
  ptx::store_global_if(condition, at, make_float4(state.z_score, state.value, state.limit, errors));
}

GVR_DEVICE StepState no_state() { return StepState{kStateUnknown, 0.0f, 0.0f, 0}; }

// False for NaN.
GVR_DEVICE bool is_z_score(float z_score) { return fabsf(z_score - kStateZScoreOrigin) <= kStateMaxZScore; }

// Whether the first number of a state is the packed window of a short row (small_row/value_window.cuh). A
// packed window is a negative float. Its exponent is that of the window's radius, a power of two, and its
// mantissa is the window's centre, in units of 1/kWindowUnits of the radius. Radii of 2^126 and more are
// excluded: for them the scale of the bins, 1 / (2 * radius), is not a normal float.
constexpr int kWindowUnits = 64;
GVR_DEVICE bool is_window(float first) { return first < 0.0f && first > -0x1p126f && first != kStateUnknown; }

// The state that a cluster sharing a row predicts from. If the row was short in the last step, the state
// holds a packed window, and the k-th value is predicted at its centre. A window has about one element for
// each of its 2048 bins, so a quarter of its radius reaches over as many elements as other predictions list.
GVR_DEVICE StepState shared_state(const StepState& state) {
  if (!is_window(state.z_score)) return state;
  const uint32_t bits = __float_as_uint(state.z_score);
  const float radius = __uint_as_float(bits & 0x7f800000u), half_width = 0.25f * radius;
  const float centre = static_cast<float>(static_cast<int>(bits << 9) >> 9);
  const uint32_t packed_errors = __float_as_uint(half_width) >> 16 | 1;
  return StepState{kStateValueOnly, centre * (radius / kWindowUnits), half_width, packed_errors};
}

// Whether kernels whose rows are shared by a cluster can predict from a state. The kinds of state that they
// write have ascending values of `z_score`. Values between the kinds predict something as well, which is
// safe, because any content is. False for NaN.
GVR_DEVICE bool is_known(const StepState& state) {
  return state.z_score >= kStateZScoreOrigin - kStateMaxZScore;
}

GVR_DEVICE bool has_value(const StepState& state) {
  return is_known(state) && state.z_score <= kStateValueOnly;
}
static_assert(kStateZScoreOrigin + kStateMaxZScore < kStateValueOnly && kStateValueOnly < kStateInfinite &&
              kStateInfinite < kStateMasked);

// Whether the value predictor is in use, which needs no sample of the row.
GVR_DEVICE bool uses_value(const StepState& state) {
  return has_value(state) && (state.packed_errors & 1) != 0;
}

// Values that one thread reads for its whole block, because another stream may be writing them and two
// threads could read different values. The other threads take them from here, behind the next block barrier.
// If `row_slot` is overwritten while threads read it, it may be that none of them stores `state` and `slot`
// (`RowJob::publish_state`). Then both are whatever the shared memory held before, which is as safe as any
// other content of the state: `slot` is used only to say whether the hint may be used.
struct RowFacts {
  StepState state;
  int32_t length;  // length of the row
  int32_t slot;    // negative: the row has none
  bool owns_slot;  // the row has the claim of its slot; only if slots are claimed (core/output_writer.cuh)
};

}  // namespace gvr_topk
