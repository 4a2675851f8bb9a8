// An interval of values that should hold the k-th value of a row, and what a row of a prefill chunk tells the
// next one.
#pragma once

#include "core/key.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::prefill {

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

// What is known of the row before.
struct LastRow {
  float value;        // close to its k-th value
  float per_element;  // interval width that held one element
  bool has_value;
  uint32_t tie_key;  // its k-th key if that has too many ties, or is not finite; otherwise kAbsentKey

  GVR_DEVICE static LastRow none() { return tied(kAbsentKey); }
  GVR_DEVICE static LastRow tied(uint32_t key) { return LastRow{0.0f, 0.0f, false, key}; }
  GVR_DEVICE static LastRow at(float value, float per_element) {
    return LastRow{value, per_element, true, kAbsentKey};
  }
};

}  // namespace gvr_topk::prefill
