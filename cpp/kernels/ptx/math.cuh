// Approximate arithmetic, less exact than the usual functions but faster, and bit masks.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// Returns 1 / sqrt(x); x must not be denormal.
__device__ __forceinline__ float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 1 / x; x must not be denormal.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns x to the power of `exponent`; x must be positive.
__device__ __forceinline__ float power(float x, float exponent) {
  float y;
  asm("{\n .reg .f32 log;\n lg2.approx.ftz.f32 log, %1;\n mul.f32 log, log, %2;\n ex2.approx.ftz.f32 %0, "
      "log;\n}"
      : "=f"(y)
      : "f"(x), "f"(exponent));
  return y;
}

// Returns a mask of `count` bits from bit `first` on; positions past bit 31 are dropped.
__device__ __forceinline__ uint32_t bit_range(int first, int count) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
  return bits;
}

}  // namespace gvr_topk::ptx
