// Comparisons in assembly, where the compiler takes an instruction too many.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// Adds 1 to `count` if a > b.
__device__ __forceinline__ void count_if_greater(int& count, uint32_t a, uint32_t b) {
  asm("{\n .reg .pred p;\n setp.gt.u32 p, %1, %2;\n @p add.s32 %0, %0, 1;\n}" : "+r"(count) : "r"(a), "r"(b));
}

// Adds `mark` to `marks` unless x < bound; so also where x is NaN.
__device__ __forceinline__ void mark_unless_less(uint32_t& marks, float x, float bound, uint32_t mark) {
  asm("{\n .reg .pred p;\n setp.geu.f32 p, %1, %2;\n @p or.b32 %0, %0, %3;\n}"
      : "+r"(marks)
      : "f"(x), "f"(bound), "r"(mark));
}

// The same unless x <= bound.
__device__ __forceinline__ void mark_unless_at_most(uint32_t& marks, float x, float bound, uint32_t mark) {
  asm("{\n .reg .pred p;\n setp.gtu.f32 p, %1, %2;\n @p or.b32 %0, %0, %3;\n}"
      : "+r"(marks)
      : "f"(x), "f"(bound), "r"(mark));
}

// The same if x >= bound, or if x <= bound.
__device__ __forceinline__ void mark_if_at_least(uint32_t& marks, uint32_t x, uint32_t bound, uint32_t mark) {
  asm("{\n .reg .pred p;\n setp.ge.u32 p, %1, %2;\n @p or.b32 %0, %0, %3;\n}"
      : "+r"(marks)
      : "r"(x), "r"(bound), "r"(mark));
}

__device__ __forceinline__ void mark_if_at_most(uint32_t& marks, uint32_t x, uint32_t bound, uint32_t mark) {
  asm("{\n .reg .pred p;\n setp.le.u32 p, %1, %2;\n @p or.b32 %0, %0, %3;\n}"
      : "+r"(marks)
      : "r"(x), "r"(bound), "r"(mark));
}

}  // namespace gvr_topk::ptx
