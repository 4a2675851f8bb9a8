// Finishes rows whose k-th value is -inf. Everything greater is buffered and selected, and the smallest other
// positions complete the k items.
//
// The other positions are not buffered, but the candidates tell where they are: up to some position, which is
// less than k, everything is selected, and from there on exactly the candidates are.
#pragma once

#include "cluster/row_context.cuh"
#include "core/output_writer.cuh"
#include "ptx/warp_scan.cuh"
#include "streaming/candidate_buffer.cuh"

namespace gvr_topk::streaming {

// Finds the position up to which everything is selected: just behind the `tie_quota`-th element that is not a
// candidate. Only the block whose part of the row comes first calls this.
template <typename T>
__device__ __forceinline__ int end_of_all(const RowContext<T>& ctx, const CandidateBuffer& buffer,
                                          uint32_t tie_quota) {
  Shared& smem = *ctx.shared;
  static_assert(32 * kRadixBins >= kStreamingMaxK, "one bit for each of the first k positions");
  uint32_t* const buffered = smem.hist;
  buffered[ctx.thread] = 0;
  __syncthreads();
  buffer.for_each(ctx.lane, [&](const BufferedValue& x) {
    if (buffer.is_buffered(x) && x.position < ctx.k)
      atomicOr(&buffered[x.position >> 5], 1u << (x.position & 31));
  });
  __syncthreads();
  uint32_t missing = ~buffered[ctx.thread];
  const uint32_t count = __popc(missing), upto = ptx::inclusive_scan(count);
  if (ctx.lane == 31) smem.warp_value[1][ctx.warp] = upto;
  __syncthreads();
  const uint32_t before = earlier_warps(ctx, 1) + upto - count;
  if (before < tie_quota && tie_quota <= before + count) {
    for (uint32_t passed = before + 1; passed < tie_quota; ++passed) missing &= missing - 1;
    smem.over_range = 32 * ctx.thread + __ffs(missing);
  }
  __syncthreads();
  return static_cast<int>(smem.over_range);
}

// Writes the items of a row whose k-th value is -inf. `result` belongs to an interval that begins with the
// least finite value: less than k elements are at or above it. `items`: k, or only those elements if the
// others are dropped.
template <typename T>
__device__ __forceinline__ void emit_masked(const RowContext<T>& ctx, const CandidateBuffer& buffer,
                                            const CountResult& result, int items,
                                            const OutputWriter& output) {
  Shared& smem = *ctx.shared;
  const uint32_t tie_quota = items - (result.above + result.inside);
  if (ctx.lane == 0) smem.warp_value[0][ctx.warp] = buffer.count;
  __syncthreads();
  int end = 0;
  if (ctx.rank == 0 && items == ctx.k) {
    end = end_of_all(ctx, buffer, tie_quota);
    for (int i = ctx.thread; i < end; i += kThreads) output.put(i, i);
  }
  const Counts& counts = smem.header[ctx.lane & (ctx.ctas - 1)].counts;
  const uint32_t in_cta = ctx.lane < ctx.rank ? counts.above + counts.listed + counts.equal : 0;
  int next = static_cast<int>(tie_quota + __reduce_add_sync(0xffffffffu, in_cta) + earlier_warps(ctx, 0));
  const uint32_t earlier = (1u << ctx.lane) - 1;
  buffer.for_each(ctx.lane, [&](const BufferedValue& x) {
    const uint32_t buffered = __ballot_sync(0xffffffffu, buffer.is_buffered(x));
    if (buffer.is_buffered(x) && x.position >= end) output.put(next + __popc(buffered & earlier), x.position);
    next += __popc(buffered);
  });
}

}  // namespace gvr_topk::streaming
