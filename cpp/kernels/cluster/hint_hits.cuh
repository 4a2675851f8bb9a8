// Counts how many of the last step's positions hold a score at or above this step's k-th value. Only the
// statistics use this count.
#pragma once

#include "cluster/row_context.cuh"
#include "core/key.cuh"
#include "gvr_topk/params.h"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk {

// The positions that the last step selected and kept in a slot.
struct HintView {
  const int32_t* indices;  // null: the row has no hint
  int offset;
};

__device__ __forceinline__ HintView hint_view(const TopkParams& p, int slot) {
  return HintView{
      slot >= 0 && p.state_indices != nullptr ? p.state_indices + slot * p.state_indices_stride : nullptr,
      p.hint_offset};
}

// Key of the score at a hinted position, or the absent key if the position lies outside the row.
template <typename T>
__device__ __forceinline__ uint32_t hinted_key(const RowView<T>& row, int offset, int32_t position) {
  // Padding (-1) is recognised before the offset is added; otherwise -1 + 1 would be taken for position 0. A
  // sum that is negative or leaves the range of int is, as an unsigned number, beyond every length.
  const uint32_t at = static_cast<uint32_t>(position) + static_cast<uint32_t>(offset);
  return position >= 0 && at < static_cast<uint32_t>(row.n) ? row.key(static_cast<int>(at)) : kAbsentKey;
}

// Adds the number of hinted positions whose score is at or above the k-th value to `hint_hits`.
template <typename T>
__device__ __forceinline__ void count_hits(const RowContext<T>& ctx, const HintView& hint, uint32_t kth) {
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
