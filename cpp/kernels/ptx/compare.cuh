// Comparisons in assembly, because the compiler would take an instruction more for each.
//
// Their results are added up in floating point: comparisons and integer additions share a pipe that takes two
// cycles for each, and additions of floats use another.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// 2^23: a sum of this number and small integers holds the integers in its lowest bits.
constexpr float kIntegerBase = 8388608.0f;

__device__ __forceinline__ uint32_t integer_of_sum(float sum) {
  return __float_as_uint(sum) - __float_as_uint(kIntegerBase);
}

// Adds 1 to `count` if a > b.
__device__ __forceinline__ void count_if_greater(float& count, uint32_t a, uint32_t b) {
  asm("{\n .reg .pred p;\n setp.gt.u32 p, %1, %2;\n @p add.f32 %0, %0, 0f3F800000;\n}"
      : "+f"(count)
      : "r"(a), "r"(b));
}

__device__ __forceinline__ void count_if_greater(float& count, uint64_t a, uint64_t b) {
  asm("{\n .reg .pred p;\n setp.gt.u64 p, %1, %2;\n @p add.f32 %0, %0, 0f3F800000;\n}"
      : "+f"(count)
      : "l"(a), "l"(b));
}

// Adds `bit`, a power of two, to `sum` unless x < bound; for NaN it is added. The comparison gives 1.0 or
// 0.0, because predicates are few and each predicated addition would wait for its comparison.
__device__ __forceinline__ void set_bit_unless_less(float& sum, float x, float bound, float bit) {
  float is_set;
  asm("set.geu.f32.f32 %0, %1, %2;" : "=f"(is_set) : "f"(x), "f"(bound));
  sum = fmaf(is_set, bit, sum);
}

// Adds `bit` unless x <= bound; for NaN it is added.
__device__ __forceinline__ void set_bit_unless_at_most(float& sum, float x, float bound, float bit) {
  float is_set;
  asm("set.gtu.f32.f32 %0, %1, %2;" : "=f"(is_set) : "f"(x), "f"(bound));
  sum = fmaf(is_set, bit, sum);
}

__device__ __forceinline__ void set_bit_if_equal(float& sum, float x, float bound, float bit) {
  float is_set;
  asm("set.eq.f32.f32 %0, %1, %2;" : "=f"(is_set) : "f"(x), "f"(bound));
  sum = fmaf(is_set, bit, sum);
}

// Adds `bit` if x > bound, as unsigned integers.
__device__ __forceinline__ void set_bit_if_greater(float& sum, uint32_t x, uint32_t bound, float bit) {
  asm("{\n .reg .pred p;\n setp.gt.u32 p, %1, %2;\n @p add.f32 %0, %0, %3;\n}"
      : "+f"(sum)
      : "r"(x), "r"(bound), "f"(bit));
}

__device__ __forceinline__ void set_bit_if_at_most(float& sum, uint32_t x, uint32_t bound, float bit) {
  asm("{\n .reg .pred p;\n setp.le.u32 p, %1, %2;\n @p add.f32 %0, %0, %3;\n}"
      : "+f"(sum)
      : "r"(x), "r"(bound), "f"(bit));
}

// Returns the greater of two floats, or NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float max;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(max) : "f"(a), "f"(b));
  return max;
}

// Return the greater number in each half of two bf16 or fp16 pairs, or NaN if either is NaN.
__device__ __forceinline__ uint32_t max_or_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t max;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}

__device__ __forceinline__ uint32_t max_or_nan_f16x2(uint32_t a, uint32_t b) {
  uint32_t max;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}

// Accumulates bits in two float sums, at most 16 bits each. Two sums halve the chain of dependent additions.
struct BitAccumulator {
  float sums[2] = {kIntegerBase, kIntegerBase};

  __device__ __forceinline__ uint32_t bits() const {
    return integer_of_sum(sums[0]) | integer_of_sum(sums[1]);
  }
};

}  // namespace gvr_topk::ptx
