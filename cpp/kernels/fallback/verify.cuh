// Phases 2 and 3, verify and collect: one pass over all elements, and one exchange.
//
// Elements above the interval are counted. Elements inside it are listed, as keys, in every CTA of the
// cluster. While the lists are under way, each CTA collects its own candidates in index order.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/row_context.cuh"
#include "core/lane_ranks.cuh"
#include "core/row_report.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::fallback {

// Appends the marked elements of a lane's tile, as keys, to this CTA's segment of its list.
template <typename T>
GVR_DEVICE void list_keys(const RowContext<T>& ctx, const Tile<T>& tile, uint32_t inside) {
  if (inside == 0) return;
  uint32_t slot = atomicAdd(&ctx.shared->counts.listed, static_cast<uint32_t>(__popc(inside)));
#pragma unroll 1  // Nearly always a lane has marked at most one element.
  for (; inside != 0; inside &= inside - 1) {
    const uint32_t key = order_key(tile.value_at(__ffs(inside) - 1));
    ctx.list.put(slot++, key);
  }
}

// Counts and lists this CTA's elements. The bits of the candidates stay in `bits` (one tile per warp) or go
// to the masks (several tiles).
template <typename T>
GVR_DEVICE void classify(const RowContext<T>& ctx, const KeyInterval& interval, Tile<T>& tile,
                         uint32_t& bits) {
  Shared& smem = *ctx.shared;
  // Finite ends are compared as values, which needs no conversion. NaN fails both comparisons, and so it
  // counts as above.
  const bool finite = kNegInfKey < interval.lo && interval.hi < kPosInfKey;
  const float lo = interval.low(), hi = interval.high();
  const uint32_t tie_key = interval.tie_key();
  uint32_t above = 0, equal = 0;
  ctx.for_each_tile(tile, [&](int step, int begin) {
    bits = finite ? match_tile(tile, begin, ctx.end, [&](float x) { return !(x < lo); })
                  : ctx.match_keys(tile, begin, [&](uint32_t x) { return x >= interval.lo; });
    if (ctx.steps > 1) ctx.mask(step) = static_cast<uint16_t>(bits);
    const uint32_t candidates = __reduce_add_sync(0xffffffffu, __popc(bits));
    if (ctx.lane == 0) smem.tile_candidates[step * kWarps + ctx.warp] = candidates;
    if (candidates == 0) return;
    const uint32_t above_bits =
        finite ? match_tile(tile, begin, ctx.end, [&](float x) { return !(x <= hi); })
               : ctx.match_keys(tile, begin, [&](uint32_t x) { return x > interval.hi; });
    above += __popc(above_bits);
    uint32_t inside = bits & ~above_bits;
    if (tie_key != kAbsentKey) {
      const uint32_t at_tie_key =
          inside & ctx.match_keys(tile, begin, [&](uint32_t x) { return x == tie_key; });
      equal += __popc(at_tie_key);
      inside &= ~at_tie_key;
    }
    list_keys(ctx, tile, inside);
  });
  ptx::reconverge(ctx.zero);
  above = __reduce_add_sync(0xffffffffu, above);
  if (ctx.lane == 0 && above != 0) ptx::add_shared(smem.counts.above, above, ctx.zero);
  ptx::reconverge(ctx.zero);
  if (tie_key == kAbsentKey) return;
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (ctx.lane == 0) ptx::add_shared(smem.counts.equal, equal, ctx.zero);
}

// Replaces each count in `tile_candidates` by the sum of the counts of all earlier tiles, and returns the
// CTA's total. Counts beyond 2^16 wrap, which is harmless: offsets are used only if all candidates can be
// collected.
template <typename T>
GVR_DEVICE uint32_t scan_tiles(const RowContext<T>& ctx) {
  Shared& smem = *ctx.shared;
  static_assert(kMaxSteps * kWarps <= 4 * kThreads, "four tiles per thread");
  ushort4& mine = reinterpret_cast<ushort4*>(smem.tile_candidates)[ctx.thread];
  const ushort4 count = 4 * ctx.thread < ctx.steps * kWarps ? mine : make_ushort4(0, 0, 0, 0);
  const uint32_t sum = count.x + count.y + count.z + count.w;
  const uint32_t upto = ptx::inclusive_scan(sum);
  if (ctx.lane == 31) smem.warp_value[2][ctx.warp] = upto;
  __syncthreads();
  const uint32_t first = earlier_warps(ctx, 2) + upto - sum;
  const uint32_t second = first + count.x, third = second + count.y;
  mine = make_ushort4(first, second, third, third + count.z);
  const uint32_t all = __reduce_add_sync(0xffffffffu, ctx.lane < kWarps ? smem.warp_value[2][ctx.lane] : 0);
  __syncthreads();
  return all;
}

// Collects this CTA's candidates in index order. First the positions are stored. Then each thread loads the
// keys of the candidates that it will emit. The keys are read again, from cache, because the registers that
// hold them cannot be indexed by a bit's number. Reading them inside the first loop would wait for each key
// in turn.
template <typename T>
GVR_DEVICE uint32_t collect(const RowContext<T>& ctx, uint32_t bits) {
  Shared& smem = *ctx.shared;
  ptx::reconverge(ctx.zero);  // Lanes have sent different vectors, or one thread has stored the header.
  uint32_t all, first = 0;
  if (ctx.steps == 1) {
    const uint32_t count = ctx.lane < kWarps ? smem.tile_candidates[ctx.lane] : 0;
    all = __reduce_add_sync(0xffffffffu, count);
    first = __reduce_add_sync(0xffffffffu, ctx.lane < ctx.warp ? count : 0);
  } else {
    all = scan_tiles(ctx);
  }
  const bool fits = all <= static_cast<uint32_t>(ctx.candidate_capacity);
  if (fits) {
    for (int step = 0; step < ctx.steps; ++step) {
      if (ctx.steps > 1) {
        bits = ctx.mask(step);
        first = smem.tile_candidates[step * kWarps + ctx.warp];
      }
      for_each_in_order<T>(bits, ctx.tile_vecs(step), ctx.lane, [&](int bit, uint32_t rank) {
        ctx.candidates[first + rank].position = bit_position<T>(ctx.tile_begin(step), bit, ctx.lane);
      });
    }
  }
  __syncthreads();
  if (fits) {
    ctx.for_each_candidate(all, [&](int i, bool there) {
      if (there) ctx.candidates[i].key = ctx.row.key(ctx.candidates[i].position);
    });
  }
  return all;
}

template <typename T>
GVR_DEVICE CountResult verify(const RowContext<T>& ctx, const KeyInterval& interval, Tile<T>& tile,
                              uint32_t parity, PhaseClock& clock) {
  Shared& smem = *ctx.shared;
  uint32_t bits = 0;
  classify(ctx, interval, tile, bits);
  // `select_kth` needs these cleared.
  smem.keys.template clear<kThreads>();
  if (ctx.thread == 0) smem.few_count = 0;
  __syncthreads();
  uint32_t collected = 0;
  send_and_wait(ctx, interval, parity, [&] {
    clock.stamp();
    collected = collect(ctx, bits);
  });
  CountResult result = read_headers(ctx, interval);
  result.collected = collected;
  return result;
}

}  // namespace gvr_topk::fallback
