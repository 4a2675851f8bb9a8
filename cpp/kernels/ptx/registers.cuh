// Keeps values in registers, and hides from the compiler where they come from.
#pragma once

#include <cstdint>

namespace gvr_topk::ptx {

// Hides the origin of a value, so that the compiler does not compute or load it again each time it is used.
__device__ __forceinline__ void keep(int& value) { asm("" : "+r"(value)); }
__device__ __forceinline__ void keep(uint32_t& value) { asm("" : "+r"(value)); }
__device__ __forceinline__ void keep(float& value) { asm("" : "+f"(value)); }
template <typename T>
__device__ __forceinline__ void keep(T*& pointer) {
  asm("" : "+l"(pointer));
}

// Returns the same shared-memory address through a register; the compiler would otherwise compute it again
// behind every barrier.
__device__ __forceinline__ unsigned char* opaque_shared(unsigned char* p) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  keep(address);
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

// Returns zero: blocks have one dimension. The compiler knows neither that, nor that the value is the same in
// all lanes.
__device__ __forceinline__ uint32_t unknown_zero() {
  uint32_t zero;
  asm volatile("mov.u32 %0, %%tid.z;" : "=r"(zero));
  return zero;
}

// Brings the lanes of a warp together behind a branch that some of them have taken, ahead of whatever the
// warp computes in common. The compiler takes lanes for converged there and leaves a plain __syncwarp() out,
// but its BSYNC has been seen not to bring them together (docs/algorithm.md, "Lanes of a warp"). Behind a
// condition that it does not know, on `unknown_zero`, the barrier stays, and what follows is guarded as well.
__device__ __forceinline__ void reconverge(uint32_t zero) {
  if (zero == 0) __syncwarp();
}

}  // namespace gvr_topk::ptx
