// Finishes rows whose guessed interval has missed in the streaming kernel.
#pragma once

#include "cluster/missed_guess.cuh"
#include "cluster/radix_select.cuh"
#include "cluster/row_job.cuh"
#include "fallback/radix_fallback.cuh"
#include "streaming/async_pipeline.cuh"
#include "streaming/count_and_emit.cuh"
#include "streaming/masked_rows.cuh"

namespace gvr_topk::streaming {

// Finishes a row whose guessed interval has missed. If all candidates of the cluster were buffered,
// everything at or above the interval's lower end is known: radix rounds over the candidates find an interval
// that holds the k-th key, and one exchange follows. If the k-th key lies further down, the row is streamed
// again, with a lower interval.
template <typename T, bool kOptions>
__device__ __noinline__ void resolve_miss_streaming(const TopkParams& p, const LaunchTraits& traits,
                                                    const SmemLayout& layout, int count, int rotation) {
  RowJob<T, kOptions> job(p, traits, layout, storage);
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  const MissedGuess& missed = smem.missed;
  PhaseClock clock(nullptr, 0, false);
  restart_counts(ctx);
  job.ctx.set_length(missed.length);
  CountResult result = missed.result;
  KeyInterval interval = missed.interval;
  CandidateBuffer buffer = make_buffer(ctx, traits, layout);
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
      if (job.writes_state() && next != nullptr) *next = StepState{kStateMasked, 0.0f, 0.0f, 0};
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
      smem.chunks_used = kWarps * CandidateBuffer::initial_chunks(layout.buffer_chunks);
    }
    __syncthreads();
    if (!is_buffered) {
      const AsyncPipeline<T> pipeline = make_pipeline(ctx, traits);
      TileProducer<T> producer(pipeline);
#pragma unroll
      for (int tile = 0; tile < kRingDepth; ++tile)
        producer.fetch(pipeline, tile * AsyncPipeline<T>::kTileBytes);
      buffer = make_buffer(ctx, traits, layout);
      collect(ctx, pipeline, producer, interval, buffer);
    }
    result = exchange(ctx, interval, buffer, exchanges++ & 1, clock, [] {});
    ++passes;
    if (result.complete) {
      const OutputWriter output = job.output(p, traits);
      StepState* const next = job.next_state_slot(p, traits, output);
      finish_row(p, traits, job, interval, result, buffer, Moments(missed), missed.source, passes, rounds,
                 output, next, clock, of_nan);
      return;
    }
    // CTAs that sample a row while it is overwritten use different intervals.
    if (is_buffered || !result.agreed) break;
    restart_counts(ctx);
  }
  // Ties of the tie key are too many, or candidates are: every element is looked at again.
  const bool try_it = result.agreed && interval.tie_key() != kAbsentKey;
  __syncthreads();  // The memory of the buffer is used for other things now.
  fallback::radix_fallback<T, kOptions>(
      p, traits, layout,
      fallback::FallbackState{try_it ? fallback::FallbackStage::kGuess : fallback::FallbackStage::kRadix,
                              interval, missed.source, static_cast<int>(exchanges), missed.length});
}

}  // namespace gvr_topk::streaming
