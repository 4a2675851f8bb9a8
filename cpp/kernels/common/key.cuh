// The order-preserving key: unsigned comparison of keys is the contract's comparison of values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace gvr_topk {

constexpr uint32_t kAbsentKey = 0;  // below every score: -inf maps to 0x007fffff
constexpr uint32_t kMinKey = 1;
constexpr uint32_t kMaxKey = 0xffffffffu;  // every NaN
constexpr uint32_t kZeroKey = 0x80000000u;

__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0.0 + 0.0 is +0.0
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return x != x ? kMaxKey : key;
}

__device__ __forceinline__ float key_to_float(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key ^ 0x80000000u : ~key;
  return __uint_as_float(bits);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// Number of elements of one 16-byte load.
template <typename T>
constexpr int kPerVec = 16 / static_cast<int>(sizeof(T));

// Keys of the elements of one 16-byte load, in index order.
template <typename T>
__device__ __forceinline__ void unpack_keys(const uint4& raw, uint32_t* key) {
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      key[i] = order_key(__uint_as_float(word[i]));
    } else {
      const ushort lo = static_cast<ushort>(word[i] & 0xffffu);
      const ushort hi = static_cast<ushort>(word[i] >> 16);
      key[2 * i] = order_key(to_float(*reinterpret_cast<const T*>(&lo)));
      key[2 * i + 1] = order_key(to_float(*reinterpret_cast<const T*>(&hi)));
    }
  }
}

}  // namespace gvr_topk
