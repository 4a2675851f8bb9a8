// The few things of CUDA that cpp/kernels/core/key.cuh uses, for a compiler that knows no CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __host__
#define __device__
#define __forceinline__ inline

using ushort = unsigned short;

struct uint4 {
  uint32_t x, y, z, w;
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The GPU's addition makes every NaN the one with all bits but the sign.
inline float __fadd_rn(float a, float b) {
  const float sum = a + b;
  return std::isnan(sum) ? __uint_as_float(0x7fffffffu) : sum;
}

struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(ushort bits) { return {bits}; }

inline float __half2float(__half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const int exponent = (x.bits >> 10) & 0x1f;
  const uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0x1f) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                        : std::ldexp(static_cast<float>(fraction | 0x400u), exponent - 25);
  return sign ? -magnitude : magnitude;
}
