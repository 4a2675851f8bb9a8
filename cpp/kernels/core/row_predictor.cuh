// An interval of values that should hold the k-th value of a row, and its prediction from the rows before.
#pragma once

#include "core/key.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// An inclusive interval of finite values that should hold the k-th value. Even bins from `first` to `last`
// divide its elements, because `lo` and `hi` themselves may lie far out.
struct ValueInterval {
  static constexpr int kLog2Bins = 8;
  static constexpr int kBins = 1 << kLog2Bins;

  float lo, hi, first, last;

  // The bin of a value. A greater value never lies in a lower bin, and NaN lies in the highest bin.
  GVR_DEVICE int bin(float x, float bins_per_unit) const {
    const float depth = __saturatef((last - x) * bins_per_unit);  // NaN becomes zero.
    return max(kBins - 1 - static_cast<int>(depth * kBins), 0);
  }

  GVR_DEVICE float bins_per_unit() const { return ptx::reciprocal(width()); }
  GVR_DEVICE float width() const { return last - first; }

  // The value in the middle of a bin.
  GVR_DEVICE float value_of(uint32_t bin) const {
    return fmaf((static_cast<float>(bin) + 0.5f) / kBins, width(), first);
  }
};

// Predicts the k-th value of a row from those of the rows before it, where these are alike.
struct RowPredictor {
  // Most elements that a predicted interval may hold. Where it would hold more, a sample of the row gives a
  // narrower interval, and the prediction is not used.
  static constexpr float kMaxInside = 1536.0f;
  static constexpr float kMinInside = 128.0f;
  static constexpr float kErrors = 5.0f;  // half-width of the interval, in mean errors
  static constexpr float kErrorDecay = 0.8f, kFastestDecay = 0.5f;
  // The least error expected at first, in units of the width that sqrt(k) elements take up. The k-th value
  // moves about that far between rows whose elements are drawn anew.
  static constexpr float kFirstError = 1.1f;
  // Rows whose k-th values are seen before one is predicted. Between rows of models the k-th value often
  // moves by hundreds of elements, and a prediction that misses costs a second read of the row.
  static constexpr int kRowsSeen = 3;

  float value;        // close to the k-th value of the last row
  float error;        // how far the k-th value moves from row to row
  float per_element;  // interval width that held one element
  int rows;           // rows seen, up to kRowsSeen
  uint32_t tie_key;   // the last row's k-th key if many elements share it, or it is not finite, or kAbsentKey

  GVR_DEVICE static RowPredictor unknown() { return tied(kAbsentKey); }
  GVR_DEVICE static RowPredictor tied(uint32_t key) { return RowPredictor{0.0f, 0.0f, 0.0f, 0, key}; }

  GVR_DEVICE bool is_close() const {
    return rows == kRowsSeen && 2.0f * kErrors * error <= kMaxInside * per_element;
  }

  GVR_DEVICE ValueInterval interval() const {
    const float radius = fmaxf(kErrors * error, 0.5f * kMinInside * per_element);
    // The lower end stays finite whatever the numbers are, so that -inf lies below the interval.
    const float lo = fmaxf(value - radius, key_to_float(kLeastFiniteKey)), hi = value + radius;
    return ValueInterval{lo, hi, lo, hi};
  }

  GVR_DEVICE void learn(float kth, float width_per_element, int k) {
    const float move = fabsf(kth - value);
    if (rows == 0) {
      error = kFirstError * sqrtf(static_cast<float>(k)) * width_per_element;
    } else if (rows < kRowsSeen) {
      error = fmaxf(error, move);
    } else {
      error = fmaxf(kFastestDecay * error, fmaf(1.0f - kErrorDecay, move, kErrorDecay * error));
    }
    value = kth;
    per_element = width_per_element;
    rows = min(rows + 1, kRowsSeen);
  }
};

}  // namespace gvr_topk
