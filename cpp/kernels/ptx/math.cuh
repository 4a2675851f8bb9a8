// Arithmetic that may be less exact than what the compiler makes of the usual functions.
#pragma once

namespace gvr_topk::ptx {

// 1 / sqrt(x), of no denormal number.
__device__ __forceinline__ float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace gvr_topk::ptx
