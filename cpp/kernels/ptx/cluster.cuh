// Thread-block clusters: ranks, barriers, and addresses in another CTA's shared memory.
#pragma once

#include <cstdint>

#include "ptx/stress_hooks.cuh"

namespace gvr_topk::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// Arrive and wait are separate so that work can stand between them. Both need converged warps. Behind a loop
// or a branch that keeps lanes apart, `reconverge` is called first, because ptxas may drop a plain
// __syncwarp.
__device__ __forceinline__ void cluster_arrive() {
  GVR_CHAOS_POINT();
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  GVR_CHAOS_POINT();
}

// Arrives without publishing anything, and so waits for no store or load. Warps need not be converged.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  GVR_CHAOS_POINT();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  GVR_CHAOS_POINT();
}

__device__ __forceinline__ void cluster_wait() {
  GVR_CHAOS_POINT();
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  GVR_CHAOS_JOINED();
  GVR_CHAOS_POINT();
}

// Returns the address, in the cluster's shared window, of CTA `rank`'s copy of a local shared address.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t shared, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared), "r"(rank));
  return r;
}

// Stores in the shared memory of CTA `rank`, where this CTA has `shared`. It is there behind the next cluster
// barrier.
__device__ __forceinline__ void store_to_rank(uint32_t shared, uint32_t rank, uint32_t value) {
  GVR_CHAOS_POINT();
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map_to_rank(shared, rank)), "r"(value) : "memory");
}

// Loads 8 bytes of the shared memory of CTA `rank`, which may not exit before the load is through.
__device__ __forceinline__ uint64_t load_from_rank(uint32_t shared, uint32_t rank) {
  GVR_CHAOS_POINT();
  uint64_t value;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(map_to_rank(shared, rank)) : "memory");
  return value;
}

}  // namespace gvr_topk::ptx
