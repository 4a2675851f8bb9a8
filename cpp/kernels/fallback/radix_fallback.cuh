// Runs the stages after the first guess, for rows of any content: ties, infinities, NaN, intervals that miss.
// `streaming` hands over what its own passes cannot finish, and the kernel of this folder starts over by it.
//
// A row is read once to compare it with an interval, once for each radix round, and once to write the
// selected positions; or only once, if the rings hold it. Nothing else of it stays behind between two passes
// but the listed keys and counts.
#pragma once

#include "cluster/guess.cuh"
#include "cluster/radix_select.cuh"
#include "cluster/row_job.cuh"
#include "fallback/two_reads.cuh"

namespace gvr_topk::fallback {

// Radix rounds over all elements of the row. The next pass may list keys at once.
template <typename T>
GVR_DEVICE KeyInterval radix_select(const RowContext<T>& ctx, const RowStream<T>& stream,
                                    const KeyInterval& range, uint32_t& exchanges, int& rounds) {
  const KeyInterval interval = gvr_topk::radix_select(ctx, range, exchanges, rounds, [&](RadixBins& bins) {
    stream.for_each_key([&](uint32_t key) { bins.add(key); });
    stream.restart();
  });
  reset_counts(ctx);
  __syncthreads();
  return interval;
}

// The origin of the interval in use.
enum class FallbackStage { kGuess, kMoved, kRadix };

// Everything that is known about a row when its interval is about to be tried. All CTAs of a cluster know the
// same, except that a first guess is each CTA's own.
struct FallbackState {
  FallbackStage stage;
  KeyInterval interval;  // the interval to try; radix rounds do not use it
  uint32_t source;       // `GuessSource` of the guess
  uint32_t exchanges;    // exchanges so far
  int passes;            // counting passes so far
  int length;            // length of the row
};

// Runs everything after the first guess, whatever the row holds. Returns false, with nothing written, if the
// CTAs turn out to have read different lengths or to have guessed different intervals.
template <typename T, bool kOptions>
GVR_DEVICE bool run_stages(const TopkParams& p, const LaunchTraits& traits, const RowJob<T, kOptions>& job,
                           const FallbackState& start) {
  const RowContext<T>& ctx = job.ctx;
  const RowStream<T> stream = start_stream(ctx);
  FallbackStage stage = start.stage;
  KeyInterval interval = start.interval, range = KeyInterval::everything();  // where radix rounds start
  CountResult result;
  WarpCounts own;
  uint32_t exchanges = start.exchanges;
  int passes = start.passes, rounds = 0, snaps = 0;
#pragma unroll 1
  while (true) {
    if (stage == FallbackStage::kRadix) interval = radix_select(ctx, stream, range, exchanges, rounds);
    result = verify(ctx, stream, interval, exchanges++ & 1, own);
    ++passes;
    if (!result.agreed && stage == FallbackStage::kGuess) {
      ptx::wait_copies<0>();
      return false;
    }
    // An interval that radix rounds found holds the k-th key by construction.
    if (result.complete || stage == FallbackStage::kRadix) break;
    restart_counts(ctx);
    if (stage == FallbackStage::kGuess && move_interval(ctx, result, interval)) {
      stage = FallbackStage::kMoved;
    } else {
      stage = FallbackStage::kRadix;
      range = range_of(result, interval, ctx.k);
    }
  }
  passes += rounds;
  const ListedKeys listed(ctx);
  const Threshold threshold = select_kth(ctx, interval, listed, result, snaps);
  const uint32_t kth = threshold.key;
  job.count_hint_hits(p, traits, kth);
  const OutputWriter output = job.output(p, traits);
  const int items = job.count_items(traits, kth, result.above);
  emit(ctx, stream, interval, listed, own, threshold, items, output);
  job.finish_dropped(p, traits, output, items);
  StepState* const next = job.next_state_slot(p, traits, output);
  if (job.writer && next != nullptr) *next = next_state(ctx, Moments(), kth, interval, result);
  job.report(p, traits, passes, result.inside, snaps, start.source,
             stage == FallbackStage::kGuess && start.passes == 0, rounds);
  return true;
}

// Finishes a row that another kernel could not finish, with a length that all CTAs know.
template <typename T, bool kOptions>
__device__ __noinline__ void radix_fallback(const TopkParams& p, const LaunchTraits& traits,
                                            FallbackState start) {
  RowJob<T, kOptions> job(p, traits, storage);
  job.ctx.row.n = start.length;
  if (job.is_short()) {
    job.write_short(p, traits);
    return;
  }
  restart_counts(job.ctx);
  run_stages(p, traits, job, start);  // All CTAs have the same interval and length, so they agree.
}

// Starts over with radix rounds after some exchanges. CTAs may have read different lengths; the length that
// the first CTA has read decides.
template <typename T, bool kOptions>
GVR_DEVICE void radix_fallback_from_start(const TopkParams& p, const LaunchTraits& traits, uint32_t source,
                                          uint32_t exchanges) {
  const int length = reinterpret_cast<const Shared*>(storage)->header[0].length;
  const FallbackState start{FallbackStage::kRadix, KeyInterval::everything(), source, exchanges, 1, length};
  radix_fallback<T, kOptions>(p, traits, start);
}

}  // namespace gvr_topk::fallback
