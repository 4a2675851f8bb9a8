// The arithmetic of radix rounds: a range of keys, its even bins, and the bin that the next round goes on
// with.
#pragma once

#include <cstdint>

namespace gvr_topk {

struct KeyRange {
  uint32_t base;
  uint32_t length;  // distance of the last key from `base`

  // Bins of the range are 2^shift keys wide, so that no more than 2^kLog2Bins of them are needed.
  template <int kLog2Bins>
  __device__ __forceinline__ int shift() const {
    return max(0, 32 - kLog2Bins - __clz(length));
  }

  // As an unsigned number the distance of a key below the base exceeds every length.
  __device__ __forceinline__ bool contains(uint32_t key) const { return key - base <= length; }

  __device__ __forceinline__ uint32_t bin(uint32_t key, int shift) const { return (key - base) >> shift; }

  // Narrows the range to one of its bins.
  __device__ __forceinline__ void narrow(uint32_t bin, int shift) {
    const uint32_t offset = bin << shift;
    base += offset;
    length = min(length - offset, (1u << shift) - 1);
  }

  __device__ __forceinline__ void narrow_to_key(uint32_t key) {
    base = key;
    length = 0;
  }
};

}  // namespace gvr_topk
