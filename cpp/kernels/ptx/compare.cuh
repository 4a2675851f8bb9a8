// Comparisons in assembly, where the compiler takes an instruction too many.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// Adds 1 to `count` if a > b.
__device__ __forceinline__ void count_if_greater(int& count, uint32_t a, uint32_t b) {
  asm("{\n .reg .pred p;\n setp.gt.u32 p, %1, %2;\n @p add.s32 %0, %0, 1;\n}" : "+r"(count) : "r"(a), "r"(b));
}

}  // namespace gvr_topk::ptx
