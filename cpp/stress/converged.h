// Counts, for every warp collective, the lanes that reach it, and those that reach it with others of the warp
// missing. Every collective of this library is meant for all lanes, so the second count should be 0; where it
// is not, the compiler must have put a warp barrier between this count and the collective. A build with
// GVR_TOPK_CHECK_CONVERGED forces this header into every CUDA file with `-include`.
//
// The collectives' names are macros from here on. Sums in assembly (kernels/ptx/warp_scan.cuh) call the macro
// of kernels/ptx/stress_hooks.cuh, which is defined here.
#pragma once

// These headers define overloads of the collectives, so they come before the macros.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "converged_counts.h"
#include "registry.h"

namespace gvr_topk::converged {

// A place is a hash of the file's name, with its folder, and of the line. eval/stress/converged.py computes
// the same hashes from the sources, and names the places by them.
__host__ __device__ constexpr uint32_t place(const char* path, uint32_t line) {
  uint32_t end = 0;
  while (path[end] != '\0') ++end;
  uint32_t hash = 2166136261u, folders = 0;
  for (uint32_t i = end; i > 0; --i) {  // from the end, up to the second slash
    if (path[i - 1] == '/' && ++folders == 2) break;
    hash = (hash ^ static_cast<unsigned char>(path[i - 1])) * 16777619u;
  }
  hash = (hash ^ line) * 16777619u;
  return (hash ^ (hash >> 16)) % kPlaces;
}

// tests/cpu/test_convergence.py asserts the same of Python's.
static_assert(place("kernels/cluster/output_offset.cuh", 54) == 1019 % kPlaces);

// Each CUDA file has its own counts, because device code is linked file by file.
static __device__ Count counts[kPlaces];

// Every lane adds for itself, to an address that differs from lane to lane. A single lane that adds for all
// is a branch, which would itself take the lanes apart, and so is the addition to one address as ptxas
// compiles it.
template <uint32_t kPlace>
__device__ __forceinline__ void reached() {
  uint32_t lanes, lane;
  asm volatile("activemask.b32 %0;" : "=r"(lanes));
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const uint64_t increment = lanes == 0xffffffffu ? 1 : 1 | 1ull << kApartBit;
  asm volatile(
      "red.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(&counts[kPlace].words[lane % kWords])),
      "l"(increment));
}

// Counts between the computation of a collective's value and the collective.
template <uint32_t kPlace, typename T>
__device__ __forceinline__ T with(T value) {
  reached<kPlace>();
  return value;
}

// This is static, and not in an unnamed namespace, because nvcc makes names of unnamed namespaces weak and
// every file needs its own function.
static cudaError_t read(Count* to) { return cudaMemcpyFromSymbol(to, counts, sizeof(counts)); }

[[maybe_unused]] static const bool added = stress::add(Table{__BASE_FILE__, read});

}  // namespace gvr_topk::converged

#define GVR_CONVERGED_PLACE ::gvr_topk::converged::place(__FILE__, __LINE__)
#define GVR_COLLECTIVE() ::gvr_topk::converged::reached<GVR_CONVERGED_PLACE>()
#define GVR_COUNTED(...) ::gvr_topk::converged::with<GVR_CONVERGED_PLACE>(__VA_ARGS__)

#define __reduce_add_sync(mask, ...) __reduce_add_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __reduce_min_sync(mask, ...) __reduce_min_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __reduce_max_sync(mask, ...) __reduce_max_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __reduce_or_sync(mask, ...) __reduce_or_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __ballot_sync(mask, ...) __ballot_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __any_sync(mask, ...) __any_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __all_sync(mask, ...) __all_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __match_any_sync(mask, ...) __match_any_sync(mask, GVR_COUNTED(__VA_ARGS__))
#define __shfl_sync(mask, value, ...) __shfl_sync(mask, GVR_COUNTED(value), __VA_ARGS__)
#define __shfl_up_sync(mask, value, ...) __shfl_up_sync(mask, GVR_COUNTED(value), __VA_ARGS__)
#define __shfl_xor_sync(mask, value, ...) __shfl_xor_sync(mask, GVR_COUNTED(value), __VA_ARGS__)
