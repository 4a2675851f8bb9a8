// The phases of the resident kernel that touch every element: verify and collect together, and emit.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/select.cuh"
#include "core/key_range.cuh"
#include "core/output_writer.cuh"
#include "ptx/warp.cuh"
#include "resident/cluster_tile.cuh"

namespace gvr_topk::resident {

// Counts a lane's elements above the interval and at its tie key, and lists those inside. All three are bits
// of the tile.
template <typename T, int kValues>
GVR_DEVICE void count_and_list(const RowContext<T>& ctx, const ClusterTile<T, kValues>& tile,
                               bool has_tie_key, uint32_t above, uint32_t at_tie_key, uint32_t inside) {
  Shared& smem = *ctx.shared;
  // Both sums come before the branches of one lane.
  const uint32_t above_count = __reduce_add_sync(0xffffffffu, __popc(above));
  const uint32_t equal = has_tie_key ? __reduce_add_sync(0xffffffffu, __popc(at_tie_key)) : 0;
  if (ctx.lane == 0) {
    ptx::add_shared(smem.counts.above, above_count, ctx.zero);
    if (has_tie_key) ptx::add_shared(smem.counts.equal, equal, ctx.zero);
  }
  if (inside != 0) {
    uint32_t slot = atomicAdd(&smem.counts.listed, static_cast<uint32_t>(__popc(inside)));
#pragma unroll 1
    while (inside != 0) {  // Two at a time, so that their loads overlap: large scores cluster.
      const int first = __ffs(inside) - 1, last = 31 - __clz(inside);
      inside = (inside & (inside - 1)) & ~(1u << last);
      const uint32_t one = tile.key(ctx.lane, first), other = tile.key(ctx.lane, last);
      ctx.list.put(slot++, one);
      if (last != first) ctx.list.put(slot++, other);
    }
  }
}

// Counts the elements above the interval and lists those inside, here and then in every CTA of the cluster.
// `meanwhile` runs while the lists are on their way.
template <typename T, int kValues, typename Meanwhile>
GVR_DEVICE CountResult exchange(const RowContext<T>& ctx, const KeyInterval& interval,
                                const ClusterTile<T, kValues>& tile, uint32_t parity, Meanwhile meanwhile) {
  const float lo = interval.low(), hi = interval.high();
  // NaN fails both comparisons, and so counts as above.
  const uint32_t not_below = tile.not_below(lo);
  const uint32_t above =
      tile.bits([&](float& sum, float x, float bit) { ptx::set_bit_unless_at_most(sum, x, hi, bit); });
  uint32_t inside = not_below & ~above, at_tie_key = 0;
  const uint32_t tie_key = interval.tie_key();
  if (tie_key != kAbsentKey) {
    at_tie_key = inside & tile.equal(key_to_float(tie_key));
    inside &= ~at_tie_key;
  }
  count_and_list(ctx, tile, tie_key != kAbsentKey, above, at_tie_key, inside);
  return exchange_lists(ctx, interval, parity, meanwhile);
}

// Writes this CTA's selected positions, in ascending order, at their final offsets. `report` runs before
// that, when all warps of the CTA have counted. `selected`: bits of this lane's elements at or above the
// k-th. `ties`: bits of those equal to it, where not all are selected.
template <typename T, int kValues, typename Report>
GVR_DEVICE void emit_tile(const RowContext<T>& ctx, const KeyInterval& interval, const Threshold& threshold,
                          uint32_t before, const ClusterTile<T, kValues>& tile, uint32_t selected,
                          uint32_t ties, const OutputWriter& output, Report report) {
  const uint32_t mine = __popc(selected & ~ties) | __popc(ties) << 16;
  const uint32_t upto = ptx::inclusive_scan(mine);
  if (ctx.lane == 31) ctx.shared->selected[1][ctx.warp] = upto;
  __syncthreads();
  report();
  OutputOffset offset(ctx, interval, threshold, before, upto - mine);
  if (ties == 0 && output.pages == nullptr) {
    const int count = __popc(selected);
    if (!output.owns(offset.next, count)) return;
    int next = offset.next + count;  // from the last on, which is found sooner than the first
#pragma unroll 1
    while (selected != 0) {
      const int bit = 31 - __clz(selected);
      selected ^= 1u << bit;
      output.put_untranslated(--next, tile.begin + bit);
    }
    return;
  }
#pragma unroll 1
  for (; selected != 0; selected &= selected - 1) {
    const int bit = __ffs(selected) - 1;
    if (offset.accept(ties >> bit & 1)) output.put(offset.next++, tile.begin + bit);
  }
}

}  // namespace gvr_topk::resident
