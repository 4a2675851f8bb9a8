// Delays threads around barriers, copies and remote accesses, so that orders come up which the memory model
// allows and which an idle GPU hardly ever takes. A chaos build (GVR_TOPK_CHAOS) forces this header into
// every CUDA file with `-include`.
//
// A kernel meets these delays at two kinds of places. The wrappers of kernels/ptx/ call the macros of
// kernels/ptx/macros.cuh, which are defined here; and `__syncthreads` is a macro from here on. What CUB does
// within is not delayed: ptxas finds no registers for its kernels with a call at each barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "chaos_modes.h"
#include "registry.h"

namespace gvr_topk::chaos {

// Each CUDA file has its own mode, because device code is linked file by file.
static __constant__ int mode;

__device__ __forceinline__ uint32_t mix(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x7feb352du;
  h = (h ^ (h >> 15)) * 0x846ca68bu;
  return h ^ (h >> 16);
}

__device__ __forceinline__ uint32_t nanoseconds() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
  return t;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t n;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}

// Waits for at least `ns` nanoseconds. A sleep may end at any time, so the SM's clock, which runs at less
// than 2 GHz, decides.
__device__ __forceinline__ void wait(uint32_t ns) {
  const int64_t end = clock64() + 2 * static_cast<int64_t>(ns);
  do {
    __nanosleep(ns < 400 ? ns : 400);
  } while (clock64() < end);
}

constexpr uint32_t kVeryLate = 20000;

// One of four delays, the longest of which outlasts a whole launch of another row or CTA.
__device__ __forceinline__ uint32_t lateness(uint32_t drawn) {
  const uint32_t which = drawn & 3;
  return which == 0 ? 500 : which == 1 ? 2000 : which == 2 ? 5000 : kVeryLate;
}

// Delays the calling lanes if the mode says so. Converged lanes of a warp draw the same numbers and stay
// converged. Nothing in here waits for another thread, because a single lane may come here alone.
static __device__ __noinline__ void delay() {
  const uint32_t now = nanoseconds();
  const uint32_t warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  const uint32_t size = cluster_size(), row = blockIdx.x / size;
  const uint32_t cta = blockIdx.x * 0x85ebca6bu;
  if (mode == kRandom) {
    const uint32_t own = mix(static_cast<uint32_t>(clock64() >> 4) ^ cta ^ (warp * 0x9e3779b9u));
    if ((own & 31) == 0) wait(own >> 21);
    const uint32_t shared = mix((now >> 13) ^ cta);  // the same for 8 us, and for all warps of the CTA
    if ((shared & 3) == 0) wait(400 + (shared >> 22));
    return;
  }
  const uint32_t while_chosen = now >> 16;  // changes every 65 us
  bool late = false;
  uint32_t drawn = mix((now >> 10) ^ cta);  // the same for all warps of a CTA, which meet at the next barrier
  if (mode == kOneWarp || mode == kAllWarpsButOne) {
    const uint32_t chosen = mix(while_chosen ^ cta) % warps;
    late = (warp == chosen) == (mode == kOneWarp);
    drawn = mix(drawn ^ (warp * 0x9e3779b9u));
  } else if (mode == kRoamingCta) {
    late = mix(while_chosen ^ row) % (size > 4 ? size : 4) == cluster_rank();
  } else if (mode == kOddRows) {
    late = (row & 1) != 0;
  }
  if (late && (drawn & 3) == 0) wait(lateness(drawn >> 2));
}

__device__ __forceinline__ void point() {
  if (mode != kOff) delay();
}

// Stands after a wait for all CTAs of a cluster. One CTA falls behind the others, which go on to store into
// its shared memory.
__device__ __forceinline__ void joined() {
  const uint32_t size = cluster_size(), rank = cluster_rank();
  if (size == 1) return;
  if ((mode == kLastCta && rank == size - 1) || (mode == kFirstCta && rank == 0)) wait(kVeryLate);
}

__device__ __forceinline__ void sync_threads() {
  point();
  __syncthreads();
  point();
}

__device__ __forceinline__ int sync_threads_count(int predicate) {
  point();
  const int count = __syncthreads_count(predicate);
  point();
  return count;
}

__device__ __forceinline__ int sync_threads_or(int predicate) {
  point();
  const int any = __syncthreads_or(predicate);
  point();
  return any;
}

__device__ __forceinline__ int sync_threads_and(int predicate) {
  point();
  const int all = __syncthreads_and(predicate);
  point();
  return all;
}

// This is static, and not in an unnamed namespace, because nvcc makes names of unnamed namespaces weak and
// every file needs its own function.
static cudaError_t set_mode(int wanted) { return cudaMemcpyToSymbol(mode, &wanted, sizeof(wanted)); }

[[maybe_unused]] static const bool added = stress::add(Setter{set_mode});

}  // namespace gvr_topk::chaos

#define GVR_CHAOS_POINT() ::gvr_topk::chaos::point()
#define GVR_CHAOS_JOINED() ::gvr_topk::chaos::joined()
#define __syncthreads() ::gvr_topk::chaos::sync_threads()
#define __syncthreads_count(predicate) ::gvr_topk::chaos::sync_threads_count(predicate)
#define __syncthreads_or(predicate) ::gvr_topk::chaos::sync_threads_or(predicate)
#define __syncthreads_and(predicate) ::gvr_topk::chaos::sync_threads_and(predicate)
