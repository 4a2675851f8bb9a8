// Reductions of one number per thread over a block. All threads take part, and each takes two block barriers.
#pragma once

#include "cluster/row_context.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk {

// A sum over the block, and over its earlier warps.
struct BlockSum {
  uint32_t all, earlier;
};

template <typename Context>
__device__ __forceinline__ BlockSum block_sum(const Context& ctx, uint32_t x) {
  uint32_t* const sums = ctx.shared->warp_value[0];
  ptx::reconverge(ctx.zero);  // Lanes have counted different elements.
  x = __reduce_add_sync(0xffffffffu, x);
  __syncthreads();  // All threads have read the last sums.
  if (ctx.lane == 0) sums[ctx.warp] = x;
  __syncthreads();
  ptx::reconverge(ctx.zero);
  x = __reduce_add_sync(0xffffffffu, ctx.lane < kWarps ? sums[ctx.lane] : 0);
  return BlockSum{x, earlier_warps(ctx, 0)};
}

// Replaces both numbers by the least and the greatest of all threads.
template <typename Context>
__device__ __forceinline__ void block_extremes(const Context& ctx, uint32_t& least, uint32_t& greatest) {
  uint32_t *const lows = ctx.shared->warp_value[1], *const highs = ctx.shared->warp_value[2];
  ptx::reconverge(ctx.zero);
  least = __reduce_min_sync(0xffffffffu, least);
  greatest = __reduce_max_sync(0xffffffffu, greatest);
  __syncthreads();  // All threads have read the last extremes.
  if (ctx.lane == 0) lows[ctx.warp] = least, highs[ctx.warp] = greatest;
  __syncthreads();
  ptx::reconverge(ctx.zero);
  least = __reduce_min_sync(0xffffffffu, lows[ctx.lane % kWarps]);
  greatest = __reduce_max_sync(0xffffffffu, highs[ctx.lane % kWarps]);
}

}  // namespace gvr_topk
