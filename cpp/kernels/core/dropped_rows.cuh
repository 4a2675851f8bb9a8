// Rows of which masked elements, those of -inf, are dropped: fewer than k items, and -1 behind them.
//
// A row longer than k loses elements only where its k-th key is that of -inf. Kernels know the key before
// they emit, and then take no tie. A row no longer than k is selected whole without being read, so this reads
// it.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "core/launch_traits.cuh"
#include "core/output_writer.cuh"
#include "core/row_context.cuh"
#include "gvr_topk/params.h"

namespace gvr_topk {

// Items of a row longer than k: all k, or those `above` a k-th key of -inf if masked elements are dropped.
__device__ __forceinline__ int count_items(const LaunchTraits& traits, int k, uint32_t kth, uint32_t above) {
  const bool drops = traits.has(LaunchTraits::kDropMasked) && kth == kNegInfKey;
  return drops ? min(static_cast<int>(above), k) : k;
}

// Writes -1 behind the row's items, and how many items there are. The thread that writes the number has
// written a larger one before, when it had read the row's length.
template <typename T>
__device__ __forceinline__ void finish_dropped_row(const TopkParams& p, const LaunchTraits& traits,
                                                   const RowContext<T>& ctx, int row,
                                                   const OutputWriter& output, int items) {
  if (!traits.has(LaunchTraits::kDropMasked)) return;
#pragma unroll 1
  for (int i = items + ctx.rank * kThreads + ctx.thread; i < ctx.k; i += ctx.ctas * kThreads) {
    output.put(i, -1);
  }
  if (traits.has(LaunchTraits::kCounts) && ctx.rank == 0 && ctx.thread == 0) p.counts[row] = items;
}

// Writes the elements above -inf of a row no longer than k, in ascending order, and returns how many there
// are. One block does.
template <typename T>
__device__ __forceinline__ int emit_short_unmasked(const RowContext<T>& ctx, const OutputWriter& output) {
  uint32_t* const in_warp = ctx.shared->warp_value[0];
  const uint32_t before = (1u << ctx.lane) - 1;
  int next = 0;
#pragma unroll 1
  for (int begin = 0; begin < ctx.row.n; begin += kThreads) {
    const int position = begin + ctx.thread;
    const bool there = position < ctx.row.n && ctx.row.key(position) > kNegInfKey;
    const uint32_t lanes = __ballot_sync(0xffffffffu, there);
    if (ctx.lane == 0) in_warp[ctx.warp] = __popc(lanes);
    __syncthreads();
    const int first = next + static_cast<int>(earlier_warps(ctx, 0));
    if (there) output.put(first + __popc(lanes & before), position);
    next += static_cast<int>(__reduce_add_sync(0xffffffffu, ctx.lane < kWarps ? in_warp[ctx.lane] : 0));
    __syncthreads();  // The counts are overwritten next.
  }
  return next;
}

// Writes all of a row no longer than k, without its masked elements. The first CTA does, because the items of
// the others would have to be counted first.
template <typename T>
__device__ __forceinline__ void write_short_dropped_row(const TopkParams& p, const LaunchTraits& traits,
                                                        const RowContext<T>& ctx, int row,
                                                        const OutputWriter& output) {
  if (ctx.rank != 0) return;
  const int items = emit_short_unmasked(ctx, output);
#pragma unroll 1
  for (int i = items + ctx.thread; i < ctx.k; i += kThreads) output.put(i, -1);
  if (traits.has(LaunchTraits::kCounts) && ctx.thread == 0) p.counts[row] = items;
}

}  // namespace gvr_topk
