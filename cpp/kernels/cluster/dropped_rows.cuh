// Output of rows whose masked elements (-inf) are dropped: fewer than k items, with -1 behind them.
//
// A row longer than k loses elements only if its k-th key is the key of -inf. Kernels know the k-th key
// before they emit, and in that case they take no ties. A row no longer than k would otherwise be selected
// whole without being read, so the functions for such rows read it here.
#pragma once

#include <cstdint>

#include "cluster/row_context.cuh"
#include "core/key.cuh"
#include "core/launch_traits.cuh"
#include "core/output_writer.cuh"
#include "gvr_topk/params.h"
#include "ptx/registers.cuh"

namespace gvr_topk {

// Number of items of a row longer than k: k, unless masked elements are dropped and the k-th key is that of
// -inf. Then only the elements `above` the k-th key are items.
__device__ __forceinline__ int count_items(const LaunchTraits& traits, int k, uint32_t kth, uint32_t above) {
  const bool drops = traits.has(LaunchTraits::kDropMasked) && kth == kNegInfKey;
  return drops ? min(static_cast<int>(above), k) : k;
}

// Writes -1 behind the row's items, and writes the number of items. The same thread has already written a
// number there that is at least as large, when it read the row's length.
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

// Writes the elements above -inf of a row no longer than k, in ascending order of position, and returns their
// number. One block does this alone.
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
    ptx::reconverge(ctx.zero);
    next += static_cast<int>(__reduce_add_sync(0xffffffffu, ctx.lane < kWarps ? in_warp[ctx.lane] : 0));
    __syncthreads();  // The counts are overwritten next.
  }
  return next;
}

// Writes a row no longer than k without its masked elements. The first CTA does this alone, because other
// CTAs could not know their offsets without counting the items of earlier CTAs first.
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
