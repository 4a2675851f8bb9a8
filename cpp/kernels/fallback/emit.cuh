// Phase 5, emit, for any content of the row: every CTA writes its own selected positions, in ascending order,
// at their final offset.
#pragma once

#include "cluster/row_context.cuh"
#include "cluster/select.cuh"
#include "core/lane_ranks.cuh"
#include "core/output_writer.cuh"
#include "core/row_report.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::fallback {

// Counts the listed keys above the k-th key and those equal to it, for each CTA's segment.
template <typename T>
GVR_DEVICE void count_segments(const RowContext<T>& ctx, const ListedKeys& listed, uint32_t kth) {
  uint32_t above = 0, equal = 0;
  listed.for_each([&](uint32_t x) {
    above += x > kth;
    equal += x == kth;
  });
  // A warp never straddles two segments, because there are at most as many CTAs as warps.
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (ctx.lane == 0 && (above | equal) != 0) {
    ptx::add_shared(ctx.shared->segment_above[listed.cta], above, ctx.zero);
    ptx::add_shared(ctx.shared->segment_equal[listed.cta], equal, ctx.zero);
  }
}

// The output offset of the next selected element, and how many more ties of the k-th key may be taken.
struct OutputCursor {
  uint32_t first;
  uint32_t ties_left;

  // Moves past some elements. `above` of them are above the k-th key, and `equal` of them are ties.
  GVR_DEVICE void advance(uint32_t above, uint32_t equal) {
    const uint32_t taken = min(equal, ties_left);
    first += above + taken;
    ties_left -= taken;
  }

  // Writes the selected ones of 32 consecutive elements, one of each lane. All lanes take part; those without
  // an element pass the absent key.
  GVR_DEVICE void emit(uint32_t key, int position, uint32_t kth, int lane, const OutputWriter& output) {
    const uint32_t earlier = (1u << lane) - 1;
    const uint32_t above = __ballot_sync(0xffffffffu, key > kth);
    const uint32_t equal = __ballot_sync(0xffffffffu, key == kth);
    const uint32_t tie = __popc(equal & earlier);
    if (key > kth || (key == kth && tie < ties_left)) {
      output.put(first + __popc(above & earlier) + min(tie, ties_left), position);
    }
    ptx::reconverge(ptx::unknown_zero());
    advance(__popc(above), __popc(equal));
  }
};

// The cursor at the CTA's first element. `items`: number of items of the row, which is k, or less if ties are
// dropped. Ties go to the smallest indices, so earlier CTAs take theirs first.
template <typename T>
GVR_DEVICE OutputCursor cta_cursor(const RowContext<T>& ctx, const KeyInterval& interval, uint32_t kth,
                                   int items) {
  const Shared& smem = *ctx.shared;
  uint32_t above = 0, equal = 0;
  if (ctx.lane < ctx.ctas) {
    // Elements of the tie key are not listed: all of them are above the k-th key, equal to it, or below.
    const uint32_t tie_key = interval.tie_key();
    const Counts& counts = smem.header[ctx.lane].counts;
    above = counts.above + smem.segment_above[ctx.lane] + (tie_key > kth ? counts.equal : 0);
    equal = tie_key == kth ? counts.equal : smem.segment_equal[ctx.lane];
  }
  ptx::reconverge(ctx.zero);
  const bool earlier = ctx.lane < ctx.rank;
  OutputCursor cursor{0, items - __reduce_add_sync(0xffffffffu, above)};
  cursor.advance(__reduce_add_sync(0xffffffffu, earlier ? above : 0),
                 __reduce_add_sync(0xffffffffu, earlier ? equal : 0));
  return cursor;
}

template <typename T>
GVR_DEVICE void store_warp_counts(const RowContext<T>& ctx, uint32_t above, uint32_t equal) {
  if (ctx.lane == 0) {
    ctx.shared->warp_value[0][ctx.warp] = above;
    ctx.shared->warp_value[1][ctx.warp] = equal;
  }
  ptx::reconverge(ctx.zero);
}

// The common case: selects among the collected candidates, about one per thread.
template <typename T>
GVR_DEVICE void emit_candidates(const RowContext<T>& ctx, const KeyInterval& interval,
                                const ListedKeys& listed, uint32_t kth, int items, uint32_t collected,
                                const OutputWriter& output, PhaseClock& clock) {
  uint32_t above = 0, equal = 0;
  ctx.for_each_candidate(collected, [&](int i, bool there) {
    const uint32_t key = there ? ctx.candidates[i].key : kAbsentKey;
    above += __popc(__ballot_sync(0xffffffffu, key > kth));
    equal += __popc(__ballot_sync(0xffffffffu, key == kth));
  });
  store_warp_counts(ctx, above, equal);
  count_segments(ctx, listed, kth);
  __syncthreads();
  clock.stamp();
  OutputCursor cursor = cta_cursor(ctx, interval, kth, items);
  cursor.advance(earlier_warps(ctx, 0), earlier_warps(ctx, 1));
  ctx.for_each_candidate(collected, [&](int i, bool there) {
    const Candidate c = there ? ctx.candidates[i] : Candidate{0, kAbsentKey};
    cursor.emit(c.key, c.position, kth, ctx.lane, output);
  });
}

// The case of too many candidates to collect, because of ties at the k-th value or a very large k. It
// compares every element with the k-th key.
template <typename T>
GVR_DEVICE void emit_elements(const RowContext<T>& ctx, const KeyInterval& interval, const ListedKeys& listed,
                              uint32_t kth, int items, Tile<T>& tile, const OutputWriter& output,
                              PhaseClock& clock) {
  const Shared& smem = *ctx.shared;
  count_segments(ctx, listed, kth);
  __syncthreads();
  clock.stamp();
  OutputCursor cta = cta_cursor(ctx, interval, kth, items);
  ctx.for_each_tile(tile, [&](int step, int begin) {
    uint32_t selected = ctx.match_keys(tile, begin, [&](uint32_t x) { return x > kth; });
    const uint32_t ties = ctx.match_keys(tile, begin, [&](uint32_t x) { return x == kth; });
    store_warp_counts(ctx, __reduce_add_sync(0xffffffffu, __popc(selected)),
                      __reduce_add_sync(0xffffffffu, __popc(ties)));
    __syncthreads();
    OutputCursor cursor = cta;
    cursor.advance(earlier_warps(ctx, 0), earlier_warps(ctx, 1));
    const int w = ctx.lane % kWarps;
    const bool once = ctx.lane < kWarps;
    cta.advance(__reduce_add_sync(0xffffffffu, once ? smem.warp_value[0][w] : 0),
                __reduce_add_sync(0xffffffffu, once ? smem.warp_value[1][w] : 0));
    const int vecs = ctx.tile_vecs(step);
    if (cursor.ties_left > 0) {
      for_each_in_order<T>(ties, vecs, ctx.lane, [&](int bit, uint32_t rank) {
        if (rank < cursor.ties_left) selected |= 1u << bit;
      });
    }
    for_each_in_order<T>(selected, vecs, ctx.lane, [&](int bit, uint32_t rank) {
      output.put(cursor.first + rank, bit_position<T>(begin, bit, ctx.lane));
    });
    __syncthreads();  // The warp counts are overwritten for the next tile.
  });
}

}  // namespace gvr_topk::fallback
