// The two reads of a row, whatever it holds. Phases 2 and 3, verify and collect: elements above the interval
// are counted, elements inside it are listed, as keys, in every CTA of the cluster. Phase 5, emit: every warp
// reads its part again, and writes its selected positions, in ascending order, at their final offset.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/select.cuh"
#include "core/output_writer.cuh"
#include "core/part_stream.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::fallback {

// A warp's part. Plans have rings of this depth.
template <typename T>
using RowStream = PartStream<T, kWarps, is_small_arch(kArch) ? 1 : kRingDepth>;

template <typename T>
GVR_DEVICE unsigned char* memory_behind_list(const RowContext<T>& ctx) {
  return static_cast<unsigned char*>(ctx.list.end(ctx.list.segment() << ctx.log2_ctas));
}

// The rings follow the list.
template <typename T>
GVR_DEVICE RowStream<T> start_stream(const RowContext<T>& ctx) {
  const RowStream<T> stream(ctx.row, memory_behind_list(ctx), ctx.warp, ctx.lane, ctx.rank, ctx.log2_ctas);
  stream.start();
  return stream;
}

// Behind the rings lies one byte for each key that this CTA can list: the warp whose part holds the element.
template <typename T>
GVR_DEVICE uint8_t* owners_of(const RowContext<T>& ctx) {
  return memory_behind_list(ctx) + kWarps * RowStream<T>::Ring::kBytes;
}

// Appends the marked elements of the tile at `slot`, as keys, to this CTA's segment of its list.
template <typename T>
GVR_DEVICE void list_keys(const RowContext<T>& ctx, const RowStream<T>& stream, uint32_t slot,
                          uint32_t inside) {
  if (inside == 0) return;
  uint32_t at = atomicAdd(&ctx.shared->counts.listed, static_cast<uint32_t>(__popc(inside)));
  uint8_t* const owners = owners_of(ctx);
#pragma unroll 1
  for (; inside != 0; inside &= inside - 1) {
    ctx.list.put(at, order_key(stream.ring.value(slot, __ffs(inside) - 1)));
    if (at < static_cast<uint32_t>(ctx.list.segment())) owners[at] = static_cast<uint8_t>(ctx.warp);
    ++at;
  }
}

// The counts of one warp's part: elements above the interval, and elements of its tie key.
struct WarpCounts {
  uint32_t above, equal;
};

template <typename T>
GVR_DEVICE CountResult verify(const RowContext<T>& ctx, const RowStream<T>& stream,
                              const KeyInterval& interval, uint32_t parity, WarpCounts& own) {
  Shared& smem = *ctx.shared;
  const IntervalTest test(interval);
  const uint32_t tie_key = interval.tie_key();
  uint32_t above = 0, equal = 0;
  stream.for_each_tile([&](int, uint32_t slot, uint32_t valid) {
    uint32_t above_bits;
    uint32_t inside = test.not_below(stream.ring, slot, valid, above_bits);
    inside &= ~above_bits;
    above += __popc(above_bits);
    if (tie_key != kAbsentKey) {
      const uint32_t ties = inside & stream.ring.matching(slot, [&](uint32_t x) { return x == tie_key; });
      equal += __popc(ties);
      inside &= ~ties;
    }
    list_keys(ctx, stream, slot, inside);
  });
  stream.restart();
  ptx::reconverge(ctx.zero);
  own = WarpCounts{__reduce_add_sync(0xffffffffu, above), __reduce_add_sync(0xffffffffu, equal)};
  if (ctx.lane == 0) {
    ptx::add_shared(smem.counts.above, own.above, ctx.zero);
    ptx::add_shared(smem.counts.equal, own.equal, ctx.zero);
  }
  ptx::reconverge(ctx.zero);
  // `select_kth` needs these cleared.
  smem.keys.template clear<kThreads>();
  if (ctx.thread == 0) smem.few_count = 0;
  ptx::reconverge(ctx.zero);
  return exchange_lists(ctx, interval, parity, [] {});
}

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
  ptx::reconverge(ctx.zero);
}

// Counts, for each warp's part, the elements above the k-th key in `warp_value[0]` and those equal to it in
// `warp_value[1]`. Elements of the tie key are not listed: all of them are above the k-th key, equal to it,
// or below.
template <typename T>
GVR_DEVICE void count_parts(const RowContext<T>& ctx, const KeyInterval& interval, const WarpCounts& own,
                            uint32_t kth) {
  Shared& smem = *ctx.shared;
  const uint32_t tie_key = interval.tie_key();
  if (ctx.lane == 0) {
    smem.warp_value[0][ctx.warp] = own.above + (tie_key > kth ? own.equal : 0);
    smem.warp_value[1][ctx.warp] = tie_key == kth ? own.equal : 0;
  }
  __syncthreads();
  const uint32_t* const keys = ctx.list.of(ctx.rank);
  const uint8_t* const owners = owners_of(ctx);
  const uint32_t listed = min(smem.header[ctx.rank].counts.listed, static_cast<uint32_t>(ctx.list.segment()));
  for (uint32_t i = ctx.thread; i < listed; i += kThreads) {
    if (keys[i] >= kth) atomicAdd(&smem.warp_value[keys[i] == kth][owners[i] % kWarps], 1u);
  }
  ptx::reconverge(ctx.zero);
  __syncthreads();
}

// The cursor at the warp's first element. `items`: number of items of the row, which is k, or less if ties
// are dropped. Ties go to the smallest indices, so earlier CTAs and warps take theirs first.
template <typename T>
GVR_DEVICE OutputCursor cursor_of_part(const RowContext<T>& ctx, const KeyInterval& interval, uint32_t kth,
                                       int items) {
  const Shared& smem = *ctx.shared;
  uint32_t above = 0, equal = 0;
  if (ctx.lane < ctx.ctas) {
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
  cursor.advance(earlier_warps(ctx, 0), earlier_warps(ctx, 1));
  return cursor;
}

template <typename T>
GVR_DEVICE void emit(const RowContext<T>& ctx, const RowStream<T>& stream, const KeyInterval& interval,
                     const ListedKeys& listed, const WarpCounts& own, const Threshold& threshold, int items,
                     const OutputWriter& output) {
  const uint32_t kth = threshold.key;
  count_segments(ctx, listed, kth);
  count_parts(ctx, interval, own, kth);
  const bool takes_all = threshold.takes_all() && items == ctx.k;
  emit_part(stream, kth, takes_all, cursor_of_part(ctx, interval, kth, items),
            [&](uint32_t item, int position) { output.put(item, position); });
}

}  // namespace gvr_topk::fallback
