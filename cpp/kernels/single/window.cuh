// What the last step leaves for a short row: where its k-th value stood, and how far around it to look. Even
// bins of that window leave the k-th value alone with a few others, so that one round is enough.
#pragma once

#include "cluster/moments.cuh"
#include "single/bins.cuh"

namespace gvr_topk::single {

// Left in one float, which is negative, as no share or place is: its exponent is that of the window's radius,
// a power of two, and its mantissa the k-th value in 64ths of that.
struct Window {
  static constexpr int kUnits = 64, kMostCentre = 1 << 22;
  static constexpr uint32_t kExponent = 0x7f800000u, kMantissa = 0x007fffffu, kSign = 0x80000000u;
  static constexpr uint32_t kLowestExponent = 1u << 23;

  float scale, bias;

  // Of what was left, if that `is_known`.
  __device__ __forceinline__ explicit Window(float left) {
    const uint32_t bits = __float_as_uint(left);
    const int centre = static_cast<int>(bits << 9) >> 9;
    scale = __uint_as_float(kSign | ((253u << 23) - (bits & kExponent)));  // -1 / (2 radius)
    bias = fmaf(static_cast<float>(centre), 0.5f / kUnits, 0.5f);
  }

  // Radii of 2^127 and more have no scale.
  __device__ __forceinline__ static bool is_known(float left) {
    return left < 0.0f && left > -0x1p126f && left != cluster::kNoFeedback;
  }

  // The bin of a value, counted from this number on. Greater values, and NaN, lie in no lower bins; all above
  // the window in the last, all below in the first.
  __device__ __forceinline__ static uint32_t first_bin() { return __float_as_uint(ptx::kNone); }
  __device__ __forceinline__ uint32_t bin(float x) const {
    const float depth = __saturatef(fmaf(x, scale, bias));  // of NaN, zero
    return __float_as_uint(fmaf(depth, 1.0f - kBins, ptx::kNone + (kBins - 1.0f)));
  }

  // What to leave after a step whose k-th value was found in this bin, where as many as `near` share a warp's
  // bins. The window moves along. It stays as wide as values need that move far, and where they hardly do, so
  // narrow that bins hold one element or so.
  __device__ __forceinline__ static float followed(float left, uint32_t bin, uint32_t near) {
    constexpr int kSteady = kBins / 128, kFar = kBins / 32;
    constexpr uint32_t kSparse = 1 << kLog2Group, kFew = 4 * kSparse, kCrowd = 8 * kSparse;
    const int move = static_cast<int>(bin) - kBins / 2;
    const bool wider = abs(move) >= kFar && near < kFew;
    const bool narrower = near > kCrowd || (abs(move) < kSteady && near > kSparse);
    const uint32_t bits = __float_as_uint(left);
    int centre = (static_cast<int>(bits << 9) >> 9) + (move >> log2_of(kBins / 2 / kUnits));
    uint32_t exponent = bits & kExponent;
    if (wider) exponent += kLowestExponent, centre >>= 1;
    if (narrower) exponent -= kLowestExponent, centre <<= 1;
    return packed(exponent, centre);
  }

  // The same after one that knew of no window; the radius is rounded down.
  __device__ __forceinline__ static float around(float kth, float radius) {
    const uint32_t exponent = __float_as_uint(radius) & kExponent;
    const float centre = kth * __uint_as_float((260u << 23) - exponent);
    return packed(exponent, fabsf(centre) < kMostCentre ? __float2int_rn(centre) : kMostCentre);
  }

 private:
  // Of moderate radii only, and of centres that fit.
  __device__ __forceinline__ static float packed(uint32_t exponent, int centre) {
    constexpr uint32_t kLeast = 67u << 23, kMost = 187u << 23;
    const bool sound = exponent - kLeast <= kMost - kLeast && abs(centre) < kMostCentre;
    const uint32_t bits = kSign | exponent | (static_cast<uint32_t>(centre) & kMantissa);
    // Half a bin makes no difference but to the one number that says nothing.
    const uint32_t nothing = __float_as_uint(cluster::kNoFeedback);
    return __uint_as_float(!sound ? nothing : bits == nothing ? bits + 1 : bits);
  }
};

}  // namespace gvr_topk::single
