// Waits between CTAs and between kernels: clusters and addresses in another CTA's shared memory; transaction
// barriers (mbarriers) in shared memory, and the stores and bulk copies that complete at them; programmatic
// dependent launch, the overlap of a kernel with the kernels before and after it.
#pragma once

#include <cstdint>

#include "ptx/macros.cuh"

namespace gvr_topk::ptx {

// Defines a function that reads a special register.
#define GVR_REGISTER(name, special)                       \
  GVR_DEVICE uint32_t name() {                            \
    uint32_t r;                                           \
    asm volatile("mov.u32 %0, %%" special ";" : "=r"(r)); \
    return r;                                             \
  }
GVR_REGISTER(cluster_rank, "cluster_ctarank")
GVR_REGISTER(cluster_size, "cluster_nctaid.x")  // how many CTAs a cluster has
GVR_REGISTER(cluster_number, "clusterid.x")
GVR_REGISTER(cluster_count, "nclusterid.x")

// Arrive and wait are separate so that work can stand between them. Both need converged warps. Behind a loop
// or a branch that keeps lanes apart, `reconverge` is called first, because ptxas may drop a plain
// __syncwarp.
GVR_DEVICE void cluster_arrive() {
  GVR_CHAOS_POINT();
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  GVR_CHAOS_POINT();
}

// Arrives without publishing anything, and so waits for no store or load. Warps need not be converged.
GVR_DEVICE void cluster_arrive_relaxed() {
  GVR_CHAOS_POINT();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  GVR_CHAOS_POINT();
}

GVR_DEVICE void cluster_wait() {
  GVR_CHAOS_POINT();
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  GVR_CHAOS_JOINED();
  GVR_CHAOS_POINT();
}

// Returns the address, in the cluster's shared window, of CTA `rank`'s copy of a local shared address.
GVR_DEVICE uint32_t map_to_rank(uint32_t shared, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared), "r"(rank));
  return r;
}

// Stores in the shared memory of CTA `rank`, where this CTA has `shared`. It is there behind the next cluster
// barrier.
GVR_DEVICE void store_to_rank(uint32_t shared, uint32_t rank, uint32_t value) {
  GVR_CHAOS_POINT();
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map_to_rank(shared, rank)), "r"(value) : "memory");
}

// Loads 8 bytes of the shared memory of CTA `rank`, which may not exit before the load is through.
GVR_DEVICE uint64_t load_from_rank(uint32_t shared, uint32_t rank) {
  GVR_CHAOS_POINT();
  uint64_t value;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(map_to_rank(shared, rank)) : "memory");
  return value;
}

// Initializes a transaction barrier in shared memory, which counts arrivals and expected bytes. Stores that
// complete at it need no fence: a thread that has waited for the barrier sees them.
GVR_DEVICE void barrier_init(uint32_t address, uint32_t arrivals) {
  GVR_CHAOS_POINT();
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ends the use of a transaction barrier, whose place may then be initialized again.
GVR_DEVICE void barrier_invalidate(uint32_t address) {
  GVR_CHAOS_POINT();
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(address) : "memory");
}

// Arrives at the transaction barrier of any CTA of the cluster, and makes it expect `bytes` more bytes. The
// condition belongs to the instruction.
GVR_DEVICE void barrier_expect_tx_if(bool condition, uint32_t barrier, uint32_t bytes) {
  GVR_CHAOS_POINT();
  asm volatile(GVR_PREDICATED("ne.u32", "%0, 0",
                              "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%1], %2")::
                   "r"(static_cast<uint32_t>(condition)),
               "r"(barrier), "r"(bytes)
               : "memory");
}

GVR_DEVICE void barrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  barrier_expect_tx_if(true, barrier, bytes);
}

// Stores to any CTA's shared memory, and completes the bytes at that CTA's transaction barrier.
GVR_DEVICE void store_async(uint32_t address, uint32_t value, uint32_t barrier) {
  GVR_CHAOS_POINT();
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
               "r"(value), "r"(barrier)
               : "memory");
}

GVR_DEVICE void store_async(uint32_t address, uint64_t value, uint32_t barrier) {
  GVR_CHAOS_POINT();
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(address),
               "l"(value), "r"(barrier)
               : "memory");
}

GVR_DEVICE void store_async(uint32_t address, uint64_t first, uint64_t second, uint32_t barrier) {
  GVR_CHAOS_POINT();
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u64 [%0], {%1, %2}, [%3];" ::"r"(address),
      "l"(first), "l"(second), "r"(barrier)
      : "memory");
}

// ptxas branches around this store instead of predicating it.
GVR_DEVICE void store_async_if(bool condition, uint32_t address, const uint4& value, uint32_t barrier) {
  GVR_CHAOS_POINT();
  asm volatile(
      GVR_PREDICATED(
          "ne.u32", "%0, 0",
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%1], {%2, %3, %4, %5}, [%6]")::
          "r"(static_cast<uint32_t>(condition)),
      "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}

// Orders this thread's accesses to shared memory before bulk copies that a thread starts behind the next
// barrier. A barrier alone does not order bulk copies.
GVR_DEVICE void fence_before_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  GVR_CHAOS_POINT();
}

// Copies whole 16-byte vectors, `bytes` in all, from global to shared memory, and completes these bytes at a
// transaction barrier that expects them.
GVR_DEVICE void copy_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  GVR_CHAOS_POINT();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Waits until the barrier's phase of this parity is complete. The loop is in assembly, because ptxas takes
// one in C++ apart, and moves behind the wait what is to be done meanwhile.
GVR_DEVICE void barrier_wait(uint32_t address, uint32_t parity) {
  GVR_CHAOS_POINT();
  asm volatile(
      "{\n .reg .pred done;\n"
      "wait:\n"
      " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra wait;\n}" ::"r"(address),
      "r"(parity)
      : "memory");
  GVR_CHAOS_POINT();
}

// Waits until the previous kernel has ended and its writes are visible, at once unless the launch carries the
// programmatic-serialization attribute. Then lets the next kernel start early, so that its launch is hidden
// behind this kernel; it waits for the end of this one in the same way.
GVR_DEVICE void grid_take_over() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  GVR_CHAOS_POINT();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace gvr_topk::ptx
