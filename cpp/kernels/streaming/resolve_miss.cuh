// Finishes rows whose guessed interval has missed in the streaming kernel.
//
// If the k-th value is -inf, everything greater is buffered and selected, and the smallest other positions
// complete the k items. The other positions are not buffered, but the candidates tell where they are: up to
// some position, which is less than k, everything is selected, and from there on exactly the candidates are.
#pragma once

#include "cluster/guess.cuh"
#include "cluster/radix_select.cuh"
#include "cluster/row_context.cuh"
#include "cluster/row_job.cuh"
#include "core/output_writer.cuh"
#include "fallback/radix_fallback.cuh"
#include "ptx/warp.cuh"
#include "streaming/async_pipeline.cuh"
#include "streaming/count_and_emit.cuh"

namespace gvr_topk::streaming {

// Finds the position up to which everything is selected: just behind the `tie_quota`-th element that is not a
// candidate. Only the block whose part of the row comes first calls this.
template <typename T>
GVR_DEVICE int end_of_all(const RowContext<T>& ctx, const CandidateBuffer& buffer, uint32_t tie_quota) {
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
GVR_DEVICE void emit_masked(const RowContext<T>& ctx, const CandidateBuffer& buffer,
                            const CountResult& result, int items, const OutputWriter& output) {
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

// Finishes a row whose guessed interval has missed. If all candidates of the cluster were buffered,
// everything at or above the interval's lower end is known: radix rounds over the candidates find an interval
// that holds the k-th key, and one exchange follows. If the k-th key lies further down, the row is streamed
// again, with a lower interval.
template <typename T, bool kOptions>
__device__ __noinline__ void resolve_miss_streaming(const TopkParams& p, const LaunchTraits& traits,
                                                    int count, int rotation) {
  RowJob<T, kOptions> job(p, traits, storage);
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  const MissedGuess& missed = smem.missed;
  restart_counts(ctx);
  job.ctx.row.n = missed.length;
  CountResult result = missed.result;
  KeyInterval interval = missed.interval;
  CandidateBuffer buffer = make_buffer(ctx, traits);
  buffer.count = count;
  buffer.rotation = rotation;
  uint32_t exchanges = missed.passes;
  int passes = missed.passes, rounds = 0;
  bool of_nan = false;
#pragma unroll 1
  while (true) {
    const bool complete = result.inside < kBufferWasFull;
    if (complete && is_masked(interval, result, ctx.k)) {
      const OutputWriter output = job.output(p, traits);
      StepState* const next = job.next_state_slot(p, traits, output);
      job.count_hint_hits(p, traits, kNegInfKey);
      const int items = job.count_items(traits, kNegInfKey, result.above + result.inside);
      emit_masked(ctx, buffer, result, items, output);
      job.finish_dropped(p, traits, output, items);
      job.write_state(traits, next, [] { return StepState{kStateMasked, 0.0f, 0.0f, 0}; });
      job.report(p, traits, passes + rounds, result.inside, 0, missed.source, false, rounds);
      return;
    }
    const bool is_buffered = complete && (result.contains_k || result.above >= static_cast<uint32_t>(ctx.k));
    if (is_buffered) {
      const KeyInterval range = range_of(result, interval, ctx.k);
      interval = radix_select(ctx, range, exchanges, rounds, [&](RadixBins& bins) {
        buffer.for_each(ctx.lane, [&](const BufferedValue& x) { bins.add(order_key(x.value)); });
      });
      of_nan = interval.lo == kMaxKey;
      if (of_nan) {
        buffer.keep_only_nan(ctx.lane);
        interval = KeyInterval::only(kPosInfKey);
      }
    } else {
      if (passes > 1 || !complete) break;
      if (!move_interval(ctx, result, interval)) interval = guess_by_row(ctx);
    }
    clear_selection(ctx);
    if (ctx.thread == 0 && !is_buffered) {
      smem.chunks_used = kWarps * CandidateBuffer::initial_chunks(kMaxBufferChunks);
    }
    __syncthreads();
    if (!is_buffered) {
      const AsyncPipeline<T> pipeline = make_pipeline(ctx, traits);
      TileProducer<T> producer(pipeline);
#pragma unroll
      for (int tile = 0; tile < kRingDepth; ++tile)
        producer.fetch(pipeline, tile * AsyncPipeline<T>::kTileBytes);
      buffer = make_buffer(ctx, traits);
      collect(ctx, pipeline, producer, interval, buffer);
    }
    result = exchange(ctx, interval, buffer, exchanges++ & 1, [] {});
    ++passes;
    if (result.complete) {
      const OutputWriter output = job.output(p, traits);
      StepState* const next = job.next_state_slot(p, traits, output);
      finish_row(p, traits, job, interval, result, buffer, Moments(missed), missed.source, passes, rounds,
                 output, next, of_nan);
      return;
    }
    // CTAs that sample a row while it is overwritten use different intervals.
    if (is_buffered || !result.agreed) break;
    restart_counts(ctx);
  }
  // Ties of the tie key are too many, or candidates are: every element is looked at again.
  static_assert(kMaxBufferChunks * kChunkBytes >= 1 << 16, "a byte for each key listed, behind the rings");
  const bool try_it = result.agreed && interval.tie_key() != kAbsentKey;
  __syncthreads();  // All threads have read the buffer. The row streams once more.
  fallback::radix_fallback<T, kOptions>(
      p, traits,
      fallback::FallbackState{try_it ? fallback::FallbackStage::kGuess : fallback::FallbackStage::kRadix,
                              interval, missed.source, exchanges, static_cast<int>(exchanges),
                              missed.length});
}

}  // namespace gvr_topk::streaming
