// Counts at every warp collective the lanes that reach it, with all others of their warp and without. Every
// collective of this library is meant for all lanes, so something has to guard one that any reach without. A
// build with GVR_TOPK_CHECK_CONVERGED forces this header into every CUDA file with `-include`: names of
// collectives, and of functions that contain one in assembly, are macros from here on.
// eval/stress/converged.py reads the counts, and these names.
#pragma once

// These headers define and call collectives, so they come before the macros.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "ptx/warp.cuh"
#include "registry.h"

namespace gvr_topk::converged {

constexpr uint32_t kPlaces = 1 << 18;

// Returns the number of a line: a hash of it and of its file's name, with the folder.
__host__ __device__ constexpr uint32_t place(const char* path, uint32_t line) {
  uint32_t end = 0, hash = 2166136261u ^ line, folders = 0;
  while (path[end] != '\0') ++end;
  while (end-- > 0 && (path[end] != '/' || ++folders < 2)) {
    hash = (hash ^ static_cast<unsigned char>(path[end])) * 16777619u;
  }
  return (hash ^ (hash >> 16)) % kPlaces;
}

// Lanes that came with all others of their warp, and those that did not. Each CUDA file has its own counts,
// because device code is linked file by file. Lanes add to several words, so that fewer wait for each other.
constexpr int kWords = 4;
static __device__ uint64_t counts[kPlaces][2][kWords];

// Counts between the computation of a collective's value and the collective. Every lane adds for itself: one
// that adds for all is a branch, which would itself take lanes apart, and so is an addition to one address as
// ptxas compiles it.
template <uint32_t kPlace, typename T>
GVR_DEVICE T counted(T value) {
  uint32_t lanes, lane;
  asm volatile("activemask.b32 %0;" : "=r"(lanes));
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  uint64_t* count = &counts[kPlace][lanes != 0xffffffffu][lane % kWords];
  asm volatile("red.global.add.u64 [%0], 1;" ::"l"(__cvta_generic_to_global(count)));
  return value;
}

using Add = void (*)(const char* file, uint32_t place, int apart, uint64_t lanes);
using Read = cudaError_t (*)(Add add);

// Calls `add` with this file's counts on the current device. Static, as in chaos.h.
static cudaError_t read(Add add) {
  static uint64_t all[kPlaces][2][kWords];
  const cudaError_t status = cudaMemcpyFromSymbol(all, counts, sizeof(counts));
  for (uint32_t place = 0; place < kPlaces; ++place)
    for (int apart = 0; apart < 2; ++apart)
      for (const uint64_t lanes : all[place][apart])
        if (lanes != 0) add(__BASE_FILE__, place, apart, lanes);
  return status;
}

[[maybe_unused]] static const bool added = stress::add<Read>(read);

}  // namespace gvr_topk::converged

#define GVR_INLINE_EXPORT GVR_TOPK_EXPORT inline __attribute__((used))

GVR_INLINE_EXPORT uint32_t gvr_topk_converged_place(const char* path, uint32_t line) {
  return gvr_topk::converged::place(path, line);
}

GVR_INLINE_EXPORT int gvr_topk_converged_read(gvr_topk::converged::Add add) {
  for (const auto read : gvr_topk::stress::entries<gvr_topk::converged::Read>())
    if (const cudaError_t status = read(add); status != cudaSuccess) return status;
  return cudaSuccess;
}

#define GVR_COUNTED(...) \
  ::gvr_topk::converged::counted<::gvr_topk::converged::place(__FILE__, __LINE__)>(__VA_ARGS__)

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
#define __syncwarp() __syncwarp(GVR_COUNTED(0xffffffffu))
#define inclusive_scan(...) inclusive_scan(GVR_COUNTED(__VA_ARGS__))
#define suffix_sum(...) suffix_sum(GVR_COUNTED(__VA_ARGS__))
#define reconverge(...) reconverge(GVR_COUNTED(__VA_ARGS__))
