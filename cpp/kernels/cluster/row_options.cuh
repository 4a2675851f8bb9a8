// What few launches ask for: rows without their masked elements, and a count of the hint's hits.
//
// If masked elements (-inf) are dropped, a row may have fewer than k items, with -1 behind them. A row longer
// than k loses elements only if its k-th key is the key of -inf. Kernels know the k-th key before they emit,
// and in that case they take no ties. A row no longer than k would otherwise be selected whole without being
// read, so the functions for such rows read it here.
//
// Only the statistics use the count of hits: how many of the last step's positions hold a score at or above
// this step's k-th value.
#pragma once

#include <cstdint>

#include "cluster/row_context.cuh"
#include "core/key.cuh"
#include "core/launch_traits.cuh"
#include "core/output_writer.cuh"
#include "gvr_topk/params.h"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// Number of items of a row longer than k: k, unless masked elements are dropped and the k-th key is that of
// -inf. Then only the elements `above` the k-th key are items.
GVR_DEVICE int count_items(const LaunchTraits& traits, int k, uint32_t kth, uint32_t above) {
  const bool drops = traits.has(LaunchTraits::kDropMasked) && kth == kNegInfKey;
  return drops ? min(static_cast<int>(above), k) : k;
}

// Writes a row no longer than k without its masked elements, in ascending order of position. The first CTA
// does this alone, because other CTAs could not know their offsets without counting the items of earlier CTAs
// first.
template <typename T>
GVR_DEVICE void write_short_dropped_row(const TopkParams& p, const LaunchTraits& traits,
                                        const RowContext<T>& ctx, int row, const OutputWriter& output) {
  if (ctx.rank != 0) return;
  uint32_t* const in_warp = ctx.shared->warp_value[0];
  const uint32_t before = (1u << ctx.lane) - 1;
  int next = 0;  // the number of items so far
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
#pragma unroll 1
  for (int i = next + ctx.thread; i < ctx.k; i += kThreads) output.put(i, -1);
  if (traits.has(LaunchTraits::kCounts) && ctx.thread == 0) p.counts[row] = next;
}

// The positions that the last step selected and kept in a slot.
struct HintView {
  const int32_t* indices;  // null: the row has no hint
  int offset;
};

// Key of the score at a hinted position, or the absent key if the position lies outside the row.
template <typename T>
GVR_DEVICE uint32_t hinted_key(const RowView<T>& row, int offset, int32_t position) {
  // Padding (-1) is recognised before the offset is added; otherwise -1 + 1 would be taken for position 0. A
  // sum that is negative or leaves the range of int is, as an unsigned number, beyond every length.
  const uint32_t at = static_cast<uint32_t>(position) + static_cast<uint32_t>(offset);
  return position >= 0 && at < static_cast<uint32_t>(row.n) ? row.key(static_cast<int>(at)) : kAbsentKey;
}

// Adds the number of hinted positions whose score is at or above the k-th value to `hint_hits`.
template <typename T>
GVR_DEVICE void count_hits(const RowContext<T>& ctx, const HintView& hint, uint32_t kth) {
#pragma unroll 1
  for (int first = 0; first < ctx.k; first += kThreads) {
    const int i = first + ctx.thread;
    const bool there = i < ctx.k && hint.indices != nullptr;
    const uint32_t key = hinted_key(ctx.row, hint.offset, there ? hint.indices[i] : -1);
    const uint32_t hits = __popc(__ballot_sync(0xffffffffu, key != kAbsentKey && key >= kth));
    if (ctx.lane == 0) ptx::add_shared(ctx.shared->hint_hits, hits, ctx.zero);
    ptx::reconverge(ctx.zero);
  }
}

}  // namespace gvr_topk
