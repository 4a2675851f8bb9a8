// What the last step leaves for a short row: where its k-th value stood, and how far around it to look. Even
// bins of that window leave the k-th value alone with a few others, so that one round is enough.
#pragma once

#include "core/step_state.cuh"
#include "ptx/compare.cuh"
#include "ptx/registers.cuh"
#include "small_row/partition.cuh"

namespace gvr_topk::small_row {

// Left in one float, which is negative, as no share or place is: its exponent is that of the window's radius,
// a power of two, and its mantissa the k-th value in 64ths of that.
struct ValueWindow {
  static constexpr int kUnits = 64, kMostCentre = 1 << 22;
  static constexpr uint32_t kExponent = 0x7f800000u, kMantissa = 0x007fffffu, kSign = 0x80000000u;
  static constexpr uint32_t kLowestExponent = 1u << 23;

  float scale, bias;

  // Of what was left, if that `is_known`.
  __device__ __forceinline__ explicit ValueWindow(float left) {
    const uint32_t bits = __float_as_uint(left);
    const int centre = static_cast<int>(bits << 9) >> 9;
    scale = __uint_as_float(kSign | ((253u << 23) - (bits & kExponent)));  // -1 / (2 radius)
    bias = fmaf(static_cast<float>(centre), 0.5f / kUnits, 0.5f);
  }

  // Radii of 2^127 and more have no scale.
  __device__ __forceinline__ static bool is_known(float left) {
    return left < 0.0f && left > -0x1p126f && left != kStateUnknown;
  }

  // The bin of a value, counted from this number on. Greater values, and NaN, lie in no lower bins; all above
  // the window in the last, all below in the first.
  __device__ __forceinline__ static uint32_t first_bin() { return __float_as_uint(ptx::kIntegerBase); }
  __device__ __forceinline__ uint32_t bin(float x) const {
    const float depth = __saturatef(fmaf(x, scale, bias));  // of NaN, zero
    return __float_as_uint(fmaf(depth, 1.0f - kBins, ptx::kIntegerBase + (kBins - 1.0f)));
  }

  // What to leave after a step whose k-th value was found in this bin, where as many as `near` share a warp's
  // bins. The window moves along. It stays as wide as values need that move far, and where they hardly do, so
  // narrow that bins hold one element or so.
  __device__ __forceinline__ static float updated(float left, uint32_t bin, uint32_t near) {
    constexpr int kSteady = kBins / 128, kFar = kBins / 32;
    constexpr uint32_t kSparse = 1 << kLog2Group, kFew = 4 * kSparse, kDense = 8 * kSparse;
    const int move = static_cast<int>(bin) - kBins / 2;
    const bool wider = abs(move) >= kFar && near < kFew;
    const bool narrower = near > kDense || (abs(move) < kSteady && near > kSparse);
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
    const uint32_t no_state = __float_as_uint(kStateUnknown);
    return __uint_as_float(!sound ? no_state : bits == no_state ? bits + 1 : bits);
  }
};

// False where the k-th element lies outside the window `left`, or is not alone enough. One thread has a place
// to leave the next one at.
template <typename T, int kValues>
__device__ __forceinline__ bool try_predicted_window(const RowContext<T>& ctx,
                                                     const RegisterTile<T, kValues>& tile, RoundBins& bins,
                                                     float left, float* next,
                                                     PartitionOf<RegisterTile<T, kValues>>& split) {
  ValueWindow window(left);
  // Of the longest rows they are computed anew: registers are short.
  constexpr bool kKeepsBins = kValues <= kWideValuesPerThread;
  uint32_t bin[kKeepsBins ? kValues : 1];
  uint32_t first = ptx::shared_address(bins.set[0]) - sizeof(uint32_t) * ValueWindow::first_bin();
  ptx::keep(first);
  tile.for_each_place([&](int i) {
    const uint32_t value_bin = window.bin(tile.value(i));
    if (kKeepsBins) bin[i] = value_bin;
    ptx::increment_shared(first + sizeof(uint32_t) * value_bin);
  });
  __syncthreads();
  const BinHit hit = locate(ctx, bins, bins.set[0], bins.set[1], false, ctx.k);
  if (hit.count > kRankDirectly || hit.bin - 1 > kBins - 3) return false;
  if (next != nullptr) *next = ValueWindow::updated(left, hit.bin, bins.group[hit.bin >> kLog2Group]);
  split.rank = ctx.k - hit.above;
  split.boundary_count = hit.count;
  if (!kKeepsBins) ptx::keep(window.scale);  // or the compiler would keep them all the same
  // 0 for each below, 1 inside, 2 above.
  int offset = 1 - static_cast<int>(hit.bin + ValueWindow::first_bin());
  ptx::keep(offset);
  uint32_t classes[RegisterTile<T, kValues>::kWords] = {};
  tile.for_each_place([&](int i) {
    const int value_bin = static_cast<int>(kKeepsBins ? bin[i] : window.bin(tile.value(i)));
    const uint32_t position_class = __viaddmin_s32_relu(value_bin, offset, 2);
    classes[i / kValuesPerThread] += position_class << 2 * (i % kValuesPerThread);
  });
#pragma unroll
  for (int w = 0; w < RegisterTile<T, kValues>::kWords; ++w) {
    split.above.word[w] = classes[w] >> 1 & kLowerBits;
    split.inside.word[w] = classes[w] & kLowerBits;
  }
  return true;
}

}  // namespace gvr_topk::small_row
