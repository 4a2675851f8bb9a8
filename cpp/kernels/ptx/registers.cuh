// What the compiler is to leave in registers.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// Makes a value of unknown origin, which will not be computed, or read from a slow place, anew each time it
// is used.
__device__ __forceinline__ void keep(int& value) { asm("" : "+r"(value)); }
__device__ __forceinline__ void keep(uint32_t& value) { asm("" : "+r"(value)); }
__device__ __forceinline__ void keep(float& value) { asm("" : "+f"(value)); }
template <typename T>
__device__ __forceinline__ void keep(T*& pointer) {
  asm("" : "+l"(pointer));
}

// The same address of shared memory, kept: it would be put together behind every barrier.
__device__ __forceinline__ unsigned char* opaque_shared(unsigned char* p) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  keep(address);
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

// Zero, but the compiler cannot know, nor that it is the same in all lanes: blocks have one dimension.
__device__ __forceinline__ uint32_t unknown_zero() {
  uint32_t zero;
  asm volatile("mov.u32 %0, %%tid.z;" : "=r"(zero));
  return zero;
}

}  // namespace gvr_topk::ptx
