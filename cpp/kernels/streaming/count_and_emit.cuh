// The phases of the streaming kernel that touch every candidate: collect, verify, and emit.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/predictor.cuh"
#include "cluster/row_job.cuh"
#include "cluster/select.cuh"
#include "core/part_stream.cuh"
#include "ptx/warp.cuh"
#include "streaming/async_pipeline.cuh"

namespace gvr_topk::streaming {

// Each warp adds this to the listed count when its candidates are incomplete: more than all lists hold, and
// so little that the sum over a cluster does not wrap.
constexpr uint32_t kBufferWasFull = 1u << 20;

// Counts the candidates above the interval and lists those inside, here and then in every CTA. `meanwhile`
// runs while the lists are on their way.
template <typename T, typename Meanwhile>
GVR_DEVICE CountResult exchange(const RowContext<T>& ctx, const KeyInterval& interval,
                                const CandidateBuffer& buffer, uint32_t parity, Meanwhile meanwhile) {
  Shared& smem = *ctx.shared;
  const uint32_t tie_key = interval.tie_key();
  const float lo = interval.low(), hi = interval.high();
  uint32_t above = 0, equal = 0;
  buffer.for_each(ctx.lane, [&](const BufferedValue& x) {
    above += !(x.value <= hi);
    if (!(lo <= x.value && x.value <= hi)) return;
    const uint32_t key = order_key(x.value);
    if (key == tie_key) {
      ++equal;
      return;
    }
    ctx.list.put(atomicAdd(&smem.counts.listed, 1u), key);
  });
  ptx::reconverge(ctx.zero);  // Lanes have listed different candidates.
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (ctx.lane == 0) {
    ptx::add_shared(smem.counts.above, above, ctx.zero);
    ptx::add_shared(smem.counts.equal, equal, ctx.zero);
    if (buffer.full) ptx::add_shared(smem.counts.listed, kBufferWasFull, ctx.zero);
  }
  return exchange_lists(ctx, interval, parity, meanwhile);
}

// Writes this CTA's selected positions, in ascending order, at their final offsets. `report` runs before
// that, when all warps of the CTA have counted.
template <typename T, typename Report>
GVR_DEVICE void emit_buffer(const RowContext<T>& ctx, const KeyInterval& interval, const ListedKeys& listed,
                            const Threshold& threshold, uint32_t before, const CandidateBuffer& buffer,
                            const OutputWriter& output, Report report) {
  count_listed(ctx, listed, threshold);
  uint32_t counts = 0;
  const float level = key_to_float(threshold.key);
  buffer.for_each(ctx.lane,
                  [&](const BufferedValue& x) { counts += packed_count(x.value, level, threshold); });
  counts = __reduce_add_sync(0xffffffffu, counts);
  if (ctx.lane == 0) ctx.shared->selected[1][ctx.warp] = counts;
  __syncthreads();
  report();
  const OutputOffset start(ctx, interval, threshold, before, 0);
  ptx::reconverge(ctx.zero);  // What follows is guarded from here on: lanes write different items.
  if (threshold.takes_all()) {
    const uint32_t earlier = (1u << ctx.lane) - 1;
    int next = start.next;
    buffer.for_each(ctx.lane, [&](const BufferedValue& x) {
      const uint32_t selected = __ballot_sync(0xffffffffu, !(x.value < level));
      if (!(x.value < level)) output.put(next + __popc(selected & earlier), x.position);
      next += __popc(selected);
    });
    return;
  }
  OutputCursor cursor{static_cast<uint32_t>(start.next), start.ties_left};
  buffer.for_each(ctx.lane, [&](const BufferedValue& x) {
    cursor.put_lanes(!(x.value <= level), x.value == level, ctx.lane,
                     [&](uint32_t item) { output.put(item, x.position); });
  });
}

// Finishes a row whose k-th key lies in the interval: refine, emit, and the state for the next step.
// `of_nan`: infinity in the buffer stands for NaN in the row.
template <typename T, bool kOptions>
GVR_DEVICE void finish_row(const TopkParams& p, const LaunchTraits& traits, const RowJob<T, kOptions>& job,
                           const KeyInterval& interval, const CountResult& result,
                           const CandidateBuffer& buffer, const Moments& moments, uint32_t source, int passes,
                           int rounds, const OutputWriter& output, StepState* next, bool of_nan = false) {
  const RowContext<T>& ctx = job.ctx;
  int snaps = 0;
  const ListedKeys listed(ctx);
  const Threshold threshold = select_kth(ctx, interval, listed, result, snaps);
  job.count_hint_hits(p, traits, of_nan ? kMaxKey : threshold.key);
  emit_buffer(ctx, interval, listed, threshold, result.above_before, buffer, output, [&] {
    job.write_state(traits, next, [&] { return next_state(ctx, moments, threshold.key, interval, result); });
    job.report(p, traits, passes + rounds, result.inside, snaps, source, passes == 1, rounds);
  });
}

}  // namespace gvr_topk::streaming
