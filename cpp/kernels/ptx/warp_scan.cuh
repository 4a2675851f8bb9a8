// Sums over the lanes of a warp.
//
// They are in assembly because a shuffle itself says whether its source lane exists: a step is one predicated
// addition.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// Returns the sum of `value` over this lane and the lower ones.
__device__ __forceinline__ uint32_t inclusive_scan(uint32_t value) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    asm volatile(
        "{\n .reg .pred p;\n .reg .u32 other;\n"
        " shfl.sync.up.b32 other|p, %0, %1, 0, 0xffffffff;\n"
        " @p add.u32 %0, %0, other;\n}"
        : "+r"(value)
        : "r"(d));
  }
  return value;
}

// Turns each of several values into its sum over this lane and the higher ones.
template <int kValues>
__device__ __forceinline__ void suffix_sums(uint32_t (&value)[kValues]) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      asm volatile(
          "{\n .reg .pred p;\n .reg .u32 other;\n"
          " shfl.sync.down.b32 other|p, %0, %1, 31, 0xffffffff;\n"
          " @p add.u32 %0, %0, other;\n}"
          : "+r"(value[i])
          : "r"(d));
    }
  }
}

__device__ __forceinline__ uint32_t suffix_sum(uint32_t value) {
  uint32_t one[1] = {value};
  suffix_sums(one);
  return one[0];
}

}  // namespace gvr_topk::ptx
