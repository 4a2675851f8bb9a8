// Comparisons in assembly, where the compiler takes an instruction too many.
//
// What comes of them is added up in floating point: comparisons and integer additions wait for the same
// pipe, which takes two cycles for each, and additions of floats for another.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// Small numbers added to this one are the last bits of the sum.
constexpr float kNone = 8388608.0f;

__device__ __forceinline__ uint32_t sum_above_none(float sum) {
  return __float_as_uint(sum) - __float_as_uint(kNone);
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

// Adds `mark`, a power of two, to `marks` unless x < bound; so also where x is NaN.
__device__ __forceinline__ void mark_unless_less(float& marks, float x, float bound, float mark) {
  asm("{\n .reg .pred p;\n setp.geu.f32 p, %1, %2;\n @p add.f32 %0, %0, %3;\n}"
      : "+f"(marks)
      : "f"(x), "f"(bound), "f"(mark));
}

// The same unless x <= bound, or if x == bound.
__device__ __forceinline__ void mark_unless_at_most(float& marks, float x, float bound, float mark) {
  asm("{\n .reg .pred p;\n setp.gtu.f32 p, %1, %2;\n @p add.f32 %0, %0, %3;\n}"
      : "+f"(marks)
      : "f"(x), "f"(bound), "f"(mark));
}

__device__ __forceinline__ void mark_if_equal(float& marks, float x, float bound, float mark) {
  asm("{\n .reg .pred p;\n setp.eq.f32 p, %1, %2;\n @p add.f32 %0, %0, %3;\n}"
      : "+f"(marks)
      : "f"(x), "f"(bound), "f"(mark));
}

// The same if x > bound, or if x <= bound.
__device__ __forceinline__ void mark_if_greater(float& marks, uint32_t x, uint32_t bound, float mark) {
  asm("{\n .reg .pred p;\n setp.gt.u32 p, %1, %2;\n @p add.f32 %0, %0, %3;\n}"
      : "+f"(marks)
      : "r"(x), "r"(bound), "f"(mark));
}

__device__ __forceinline__ void mark_if_at_most(float& marks, uint32_t x, uint32_t bound, float mark) {
  asm("{\n .reg .pred p;\n setp.le.u32 p, %1, %2;\n @p add.f32 %0, %0, %3;\n}"
      : "+f"(marks)
      : "r"(x), "r"(bound), "f"(mark));
}

// Marks of 16 elements, those of neighbouring vectors apart, for shorter chains.
struct Marks {
  float of[2] = {kNone, kNone};

  __device__ __forceinline__ uint32_t bits() const { return sum_above_none(of[0]) | sum_above_none(of[1]); }
};

}  // namespace gvr_topk::ptx
