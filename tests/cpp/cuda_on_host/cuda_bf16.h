// bfloat16 for a compiler that knows no CUDA; see cuda_fp16.h.
#pragma once

#include "cuda_fp16.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
