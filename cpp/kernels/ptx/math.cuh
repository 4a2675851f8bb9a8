// Arithmetic that may be less exact than what the compiler makes of the usual functions, and bit masks.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// 1 / sqrt(x), where x is not denormal.
__device__ __forceinline__ float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, where x is not denormal.
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

// x to the power of `exponent`, where x is positive.
__device__ __forceinline__ float power(float x, float exponent) {
  float y;
  asm("{\n .reg .f32 log;\n lg2.approx.ftz.f32 log, %1;\n mul.f32 log, log, %2;\n ex2.approx.ftz.f32 %0, "
      "log;\n}"
      : "=f"(y)
      : "f"(x), "f"(exponent));
  return y;
}

// `count` bits from bit `first` on; positions past bit 31 are dropped.
__device__ __forceinline__ uint32_t bit_range(int first, int count) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
  return bits;
}

}  // namespace gvr_topk::ptx
