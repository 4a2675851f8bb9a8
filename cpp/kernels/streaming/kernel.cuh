// Rows longer than a cluster's registers stream through shared memory once. What is at or above the
// bracket's lower end stays behind, in index order, so that the rest of the work is on some hundred
// elements of a CTA.
//
// Like the resident kernel, this one holds the usual way only. Where the bracket fails
// `resolve_miss_streaming` looks at what was kept, and streams the row once more if that is not enough;
// `radix_fallback` takes the rest: rows whose candidates are too many, and plateaus inside the bracket.
//
// Rows that are not aligned do not come here, but to the general kernel.
#pragma once

#include <algorithm>

#include "core/guess.cuh"
#include "core/row_job.cuh"
#include "fallback/radix_fallback.cuh"
#include "streaming/async_pipeline.cuh"
#include "streaming/count_and_emit.cuh"
#include "streaming/resolve_miss.cuh"

namespace gvr_topk::streaming {

inline size_t streaming_bytes(const LaunchTraits& traits, const SmemLayout& layout) {
  return std::max(shared_bytes(traits, layout),
                  fixed_bytes(traits.list_capacity(), kRingDepth) + layout.buffer_chunks * kChunkBytes);
}

// `kProbes`: as in the resident kernel.
template <typename T, int kProbes, Specialization kSpecialization>
__global__ void __launch_bounds__(kThreads, 1)
    streaming_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ TopkParams p,
                   const __grid_constant__ SmemLayout layout) {
  const LaunchTraits traits = launch_traits.in_registers<kSpecialization, false>();
  ptx::grid_take_over();
  RowJob<T> job(p, traits, layout, storage);
  const RowContext<T>& ctx = job.ctx;
  Shared& sm = *ctx.shared;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> traits.log2_ctas(), job.writer);
  clock.stamp();
  StepState state = job.load_state_early(p, traits);
  __syncwarp();  // or they would be asked for behind what comes now
  // The pool's store is not used before the row is sifted.
  RowProbe<T, kProbes> ahead(ctx, traits, reinterpret_cast<uint4*>(buffer_storage(ctx, traits)));
  job.load_state_late(p, traits, state);
  prepare_exchange(ctx);
  if (ctx.thread == 0) sm.chunks_used = kWarps * CandidateBuffer::initial_chunks(layout.buffer_chunks);
  arrive_at_start(ctx);
  job.agree_on_length(p, traits);
  if (job.is_short()) {
    fallback::finish_short_row(p, launch_traits, layout, storage, job,
                               !traits.has(LaunchTraits::kReadsState));
    return;
  }
  if (ctx.row.n <= p.width >> 2) {  // few of the places looked at lie in the row
    ptx::wait_copies<0>();
    ahead.fetch(ctx, traits);
  }

  const AsyncPipeline<T> pipeline = make_pipeline(ctx, traits);
  TileProducer<T> producer(pipeline);
  const auto fetch = [&](int first, int last) {
#pragma unroll
    for (int tile = first; tile < last; ++tile) producer.fetch(pipeline, tile * AsyncPipeline<T>::kTileBytes);
  };
  fetch(0, 1);
  Moments moments;
  KeyInterval interval;
  // A sample first: behind all that the ring can hold it would wait for megabytes.
  if (traits.has(LaunchTraits::kReadsState)) {
    fetch(1, kRingDepth);
    ptx::wait_copies<kRingDepth>();
    job.publish_state(p, traits, state);
    moments = Moments(ctx, ahead);  // behind whose barrier all have it
    state = sm.facts.state;
    if (ctx.ctas > 1) ptx::cluster_wait();
    interval = guess(ctx, moments, [&] { return job.hint(p, traits); }, state, kMinHintShare, [] {});
  } else {
    const RowSampler sampling = sampling_of(ctx, traits, ahead);
    ptx::wait_copies<1>();
    if (ctx.ctas > 1) ptx::cluster_wait();
    interval = guess_unfed(ctx, traits, ahead, sampling, [&] { fetch(1, kRingDepth); });
  }
  const uint32_t source = interval.source;
  clock.stamp();

  CandidateBuffer buffer = make_buffer(ctx, traits, layout);
  buffer.claim_share(ctx.lane);
  // That is for `radix_fallback`, but only once all CTAs are known to agree.
  buffer.full = may_be_dense(interval);
  if (buffer.full) {
    ptx::wait_copies<0>();
  } else {
    filter_row(ctx, pipeline, producer, interval.low(), buffer);
  }
  OutputWriter output;
  StepState* next = nullptr;
  const CountResult result = exchange(ctx, interval, buffer, 0, clock, [&] {
    output = job.output(p, traits);
    output.keep(traits);
    next = job.next_state_slot(p, traits, output);
    if (traits.has(LaunchTraits::kWritesState)) ptx::keep(next);
  });
  if (result.complete) {
    finish_row(p, traits, job, interval, result, buffer, moments, source, 1, 0, output, next, clock);
  } else if (result.agreed) {
    if (ctx.thread == 0) {
      sm.missed = MissedGuess{interval, result, 1, ctx.row.n, 0, moments.mean, moments.deviation, source};
    }
    resolve_miss_streaming<T>(p, launch_traits, layout, storage, buffer.count, buffer.rotation);
  } else {
    fallback::radix_fallback_from_start(p, launch_traits, layout, storage, ctx, source);
  }
}

}  // namespace gvr_topk::streaming
