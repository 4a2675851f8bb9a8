// Selects the top k of rows longer than a cluster's registers: the row streams once through shared memory,
// and some hundred candidates per CTA stay behind.
//
// Grid: rows * ctas CTAs of 512 threads, in clusters of `ctas` along x; cluster r works on row r.
//
// Phases:
// - guess: an interval of keys that is believed to hold the k-th, from the state that the last step left,
//   or from a sample of the row (cluster/guess.cuh);
// - collect: each warp streams its part of the row and keeps, in index order, the elements at or above the
//   interval's lower end (streaming/async_pipeline.cuh);
// - verify: candidates are counted above the interval and listed inside, and one exchange joins the CTAs;
// - refine: the exact k-th key is found among the listed ones (cluster/select.cuh);
// - emit: each CTA writes its selected positions, and one thread the state for the next step.
//
// The code inline in this kernel is that of an interval that holds the k-th key. Where it misses,
// streaming/resolve_miss.cuh works on the buffered candidates, and streams the row once more if they are not
// enough; `radix_fallback` takes the rest. A row much shorter than its buffer is left to the first CTA
// (small_row/solo_row.cuh).
#pragma once

#include "cluster/guess.cuh"
#include "cluster/row_job.cuh"
#include "fallback/radix_fallback.cuh"
#include "ptx/barrier.cuh"
#include "small_row/solo_row.cuh"
#include "streaming/async_pipeline.cuh"
#include "streaming/count_and_emit.cuh"
#include "streaming/resolve_miss.cuh"

namespace gvr_topk::streaming {

// Prefetches the start of the row into L2 before the row's length is known, each CTA a part. A row much
// shorter than its buffer is then under way, and in a longer row these elements are read anyway.
template <typename T>
GVR_DEVICE void prefetch_row(const RowContext<T>& ctx) {
  constexpr int kPrefetchBytes = 16384, kElements = kPrefetchBytes / sizeof(T);
  const int begin = ctx.rank * kElements;
  if (ctx.thread == kThreads - 32 && begin + kElements <= ctx.row.n) {
    ptx::prefetch_to_l2(ctx.row.boundary() + begin, kPrefetchBytes);
  }
}

// The first CTA's part of a row that streams holds the first k positions (streaming/resolve_miss.cuh). Of a
// row with a lead, and for a larger k, `make_pipeline` sees to it.
static_assert(kWarps * warp_span(longest_solo_row(Family::kStreaming) + 1, log2_of(kMaxClusterSize), 4) >=
              kMaxSoloK);

static_assert(small_row::kSoloBytes <= fixed_bytes(0, kRingDepth) - fixed_bytes(0, 0));

template <typename T, Specialization kSpecialization>
__global__ void __launch_bounds__(kThreads, 1)
    streaming_topk(const __grid_constant__ LaunchTraits launch_traits, const __grid_constant__ TopkParams p) {
  if constexpr (!has_family(Family::kStreaming, kArch)) {
    __trap();
    return;
  }
  constexpr bool kOptions = kSpecialization == Specialization::kGeneric;
  constexpr auto kStartOver = fallback::radix_fallback_from_start<T, kOptions>;
  const LaunchTraits traits = launch_traits.in_registers<kSpecialization, false>();
  ptx::grid_take_over();
  RowJob<T, kOptions> job(p, traits, storage);
  job.ctx.warp = __shfl_sync(0xffffffffu, job.ctx.warp, 0);  // The compiler then knows what a warp shares.
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  StepState state = job.load_state_early(p, traits);
  __syncwarp();  // Otherwise the compiler would issue the loads of the state behind those of the sample.
  RowProbe<T> probe(ctx, traits);
  prefetch_row(ctx);
  job.load_state_late(p, traits, state);
  prepare_exchange(ctx);
  if (ctx.thread == 0) smem.chunks_used = kWarps * CandidateBuffer::initial_chunks(kMaxBufferChunks);
  arrive_at_start(ctx);
  job.publish_state(p, traits, state);
  job.agree_on_length(p, traits);
  const bool is_solo = is_solo_row(Family::kStreaming, p.width, ctx.row.n, ctx.k, ctx.row.lead);
  if (__any_sync(0xffffffffu, job.is_short() || is_solo)) {
    const small_row::SoloRow solo{ctx.row.n, job.requested_slot,
                                  static_cast<uint32_t>(fixed_bytes(traits.list_capacity(), 0)),  // the ring
                                  StagedRow{}, !traits.has(LaunchTraits::kReadsState)};
    const bool agreed = small_row::finish_alone<Family::kStreaming, has_whole_rows(kSpecialization)>(
        p, launch_traits, job, is_solo, solo);
    if (!agreed) kStartOver(p, launch_traits, kGuessNone, 1);
    return;
  }
  // In a row much shorter than its buffer, few of the probed positions lie in the row: they are chosen again.
  // The candidate buffer is not used before the row is filtered.
  if (ctx.row.n <= p.width >> 2)
    probe.fetch(reinterpret_cast<uint4*>(buffer_storage(ctx, traits)), ctx, traits);

  const AsyncPipeline<T> pipeline = make_pipeline(ctx, traits);
  TileProducer<T> producer(pipeline);
  const auto fetch = [&](int first, int last) {
#pragma unroll
    for (int tile = first; tile < last; ++tile) producer.fetch(pipeline, tile * AsyncPipeline<T>::kTileBytes);
  };
  fetch(0, 1);

  // Guess. Without state, the ring is filled only after the sample has been read. Behind a full ring, the
  // wait for the sample would include megabytes of the row.
  Moments moments;
  KeyInterval interval;
  if (traits.has(LaunchTraits::kReadsState)) {
    fetch(1, kRingDepth);
    ptx::wait_copies<kRingDepth>();
    ptx::reconverge(ctx.zero);  // Lanes have copied what lies in the row.
    moments = Moments(ctx, probe);
    state = shared_state(smem.facts.state);
    if (ctx.ctas > 1) ptx::cluster_wait();
    interval = guess(ctx, job.hint_reason(p, traits, is_known(state)), state, moments);
  } else {
    const RowSampler sampling = sampling_of(ctx, probe);
    ptx::wait_copies<1>();
    ptx::reconverge(ctx.zero);  // See above.
    if (ctx.ctas > 1) ptx::cluster_wait();
    interval = guess_without_state(ctx, probe, sampling, [&] { fetch(1, kRingDepth); }, [] {});
  }
  const uint32_t source = interval.source;

  CandidateBuffer buffer = make_buffer(ctx, traits);
  collect(ctx, pipeline, producer, interval, buffer);

  // Verify.
  OutputWriter output;
  StepState* next = nullptr;
  const CountResult result =
      exchange(ctx, interval, buffer, 0, [&] { job.prepare_output(p, traits, output, next); });

  // Refine and emit.
  if (result.complete) {
    finish_row(p, traits, job, interval, result, buffer, moments, source, 1, 0, output, next);
  } else if (result.agreed) {
    if (ctx.thread == 0) {
      smem.missed = MissedGuess{interval, result, 1, ctx.row.n, 0, moments.mean, moments.deviation, source};
    }
    resolve_miss_streaming<T, kOptions>(p, launch_traits, buffer.count, buffer.rotation);
  } else {
    kStartOver(p, launch_traits, source, 1);
  }
}

}  // namespace gvr_topk::streaming
