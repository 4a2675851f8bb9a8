// The arithmetic of radix rounds: a range of keys, its division into bins of equal width, and the narrowing
// to one bin for the next round.
#pragma once

#include <cstdint>

namespace gvr_topk {

struct KeyRange {
  uint32_t base;
  uint32_t length;  // distance from `base` to the last key

  // Bins of the range are 2^shift keys wide. With this shift at most 2^kLog2Bins bins cover the range.
  template <int kLog2Bins>
  __device__ __forceinline__ int shift() const {
    return max(0, 32 - kLog2Bins - __clz(length));
  }

  // Unsigned wrap: the distance of a key below the base exceeds every length.
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
