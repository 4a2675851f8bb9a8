// Rows whose k-th value is -inf: all that is greater was kept, and of the rest the smallest positions fill up
// what is missing to k. They are not kept, but what is kept says where they are: up to some position, which
// is less than k, everything is selected, and from there on all that is kept.
#pragma once

#include "cluster/emit.cuh"
#include "cluster/pool.cuh"

namespace gvr_topk::cluster {

// Finds, in the block whose part of the row begins with it, the position up to which everything is selected:
// behind the `quota`-th of those that are not kept.
template <typename T>
__device__ __forceinline__ int end_of_all(const Task<T>& task, const Pool& pool, uint32_t quota) {
  Shared& sm = *task.shared;
  static_assert(32 * kRadixBins >= kStreamMaxK, "one bit for each of the first k positions");
  uint32_t* const kept = sm.hist;
  kept[task.thread] = 0;
  __syncthreads();
  pool.for_each(task.lane, [&](const Kept& x) {
    if (pool.is_kept(x) && x.position < task.k) atomicOr(&kept[x.position >> 5], 1u << (x.position & 31));
  });
  __syncthreads();
  uint32_t missing = ~kept[task.thread];
  const uint32_t count = __popc(missing), upto = inclusive_scan(count);
  if (task.lane == 31) sm.warp_value[1][task.warp] = upto;
  __syncthreads();
  const uint32_t before = earlier_warps(task, 1) + upto - count;
  if (before < quota && quota <= before + count) {
    for (uint32_t passed = before + 1; passed < quota; ++passed) missing &= missing - 1;
    sm.over_range = 32 * task.thread + __ffs(missing);
  }
  __syncthreads();
  return static_cast<int>(sm.over_range);
}

// `verdict` is of a bracket that begins with the least finite value: less than k elements are at or above it.
template <typename T>
__device__ __forceinline__ void emit_masked(const Task<T>& task, const Pool& pool, const Verdict& verdict,
                                            const Sink& sink) {
  Shared& sm = *task.shared;
  const uint32_t quota = task.k - (verdict.above + verdict.inside);
  if (task.lane == 0) sm.warp_value[0][task.warp] = pool.count;
  __syncthreads();
  int end = 0;
  if (task.rank == 0) {
    end = end_of_all(task, pool, quota);
    for (int i = task.thread; i < end; i += kThreads) sink.put(i, i);
  }
  const Counts& counts = sm.header[task.lane & (task.ctas - 1)].counts;
  const uint32_t in_cta = task.lane < task.rank ? counts.above + counts.listed + counts.equal : 0;
  int next = static_cast<int>(quota + __reduce_add_sync(0xffffffffu, in_cta) + earlier_warps(task, 0));
  const uint32_t earlier = (1u << task.lane) - 1;
  pool.for_each(task.lane, [&](const Kept& x) {
    const uint32_t kept = __ballot_sync(0xffffffffu, pool.is_kept(x));
    if (pool.is_kept(x) && x.position >= end) sink.put(next + __popc(kept & earlier), x.position);
    next += __popc(kept);
  });
}

}  // namespace gvr_topk::cluster
