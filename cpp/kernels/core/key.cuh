// Maps scores to order-preserving keys: unsigned comparison of keys is the contract's comparison of values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gvr_topk/params.h"
#include "ptx/macros.cuh"

namespace gvr_topk {

constexpr uint32_t kAbsentKey = 0;  // below every score: -inf maps to 0x007fffff
constexpr uint32_t kMinKey = 1;
constexpr uint32_t kMaxKey = 0xffffffffu;  // every NaN
constexpr uint32_t kZeroKey = 0x80000000u;
constexpr uint32_t kNegInfKey = 0x007fffffu;
constexpr uint32_t kPosInfKey = 0xff800000u;
constexpr uint32_t kLeastFiniteKey = kNegInfKey + 1;
constexpr uint32_t kMostFiniteKey = kPosInfKey - 1;

GVR_DEVICE uint32_t order_key(float x) {
  // The addition turns -0.0 into +0.0, and every NaN into the NaN whose bits are all set except the sign.
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// The key of the value of this dtype whose bits these are.
GVR_DEVICE uint32_t order_key(Dtype dtype, uint32_t bits) {
  if (dtype == Dtype::kFloat32) return order_key(__uint_as_float(bits));
  if (dtype == Dtype::kBfloat16) return order_key(__uint_as_float(bits << 16));
  return order_key(__half2float(__ushort_as_half(static_cast<uint16_t>(bits))));
}

GVR_DEVICE float key_to_float(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
  return __uint_as_float(bits);
}

GVR_DEVICE float to_float(float x) { return x; }
GVR_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
GVR_DEVICE float to_float(__half x) { return __half2float(x); }

// Number of low bits that carry no information in keys of type T. They are zeros in keys from that of zero
// upwards, and ones in keys below it and in the key of NaN. Keys without them keep their order and distances,
// and a search has fewer bits to search.
template <typename T>
constexpr int kInvariantBits = sizeof(T) == 4              ? 0
                               : std::is_same_v<T, __half> ? 13
                                                           : 16;

__host__ __device__ constexpr int invariant_bits(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 0 : dtype == Dtype::kFloat16 ? kInvariantBits<__half> : 16;
}

// Machine epsilon of T.
template <typename T>
constexpr float kEpsilon = sizeof(T) == 4              ? 0x1p-23f
                           : std::is_same_v<T, __half> ? 0x1p-10f
                                                       : 0x1p-7f;

// The full key whose bits above the invariant low bits are `bits`.
template <typename T>
GVR_DEVICE uint32_t whole_key(uint32_t bits) {
  const uint32_t key = bits << kInvariantBits<T>;
  const bool ends_in_ones = key < kZeroKey || bits == kMaxKey >> kInvariantBits<T>;
  return ends_in_ones ? key | ((1u << kInvariantBits<T>)-1) : key;
}

// Number of elements of one 16-byte load.
template <typename T>
constexpr int kPerVec = 16 / static_cast<int>(sizeof(T));

// Element `e` of a 16-byte load.
template <typename T>
GVR_DEVICE float element(const uint4& vec, int e) {
  const uint32_t word[4] = {vec.x, vec.y, vec.z, vec.w};
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word[e]);
  } else {
    const ushort half = static_cast<ushort>(word[e / 2] >> (16 * (e % 2)));
    return to_float(*reinterpret_cast<const T*>(&half));
  }
}

// A 16-byte vector in which every element is -inf.
template <typename T>
GVR_DEVICE uint4 negative_infinity_vec() {
  uint32_t bits = 0xff800000u;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) bits = 0xff80ff80u;
  if constexpr (std::is_same_v<T, __half>) bits = 0xfc00fc00u;
  return make_uint4(bits, bits, bits, bits);
}

// Makes element `e` of a vector's words -inf.
template <typename T>
GVR_DEVICE void mask_element(uint32_t (&word)[4], int e) {
  const uint4 masked = negative_infinity_vec<T>();
  if constexpr (sizeof(T) == 4) {
    word[e] = masked.x;
  } else {
    const uint32_t half = 0xffffu << (16 * (e & 1));
    word[e / 2] = (word[e / 2] & ~half) | (masked.x & half);
  }
}

}  // namespace gvr_topk
