// Selects the exact top k in the way of the paper's kernel. This is the documented baseline, and
// gvr_topk.evaluation.paper_reference is its readable model.
//
// Grid: one CTA of 512 threads per row.
//
// Phases (paper, section 4.2):
// - guess: a first threshold comes from the values of this row at the hinted positions (paper_gvr/guess.cuh);
// - verify: passes over the row count the elements that reach a threshold, until there are between k and 6144
//   (paper_gvr/verify.cuh). A pass leaves one bit per element;
// - collect: those elements are collected in index order (paper_gvr/refine.cuh);
// - refine: the exact k-th value among them is found, and the selection is written (paper_gvr/refine.cuh).
//
// If float arithmetic does not settle the search of a row, radix rounds do, as in a cluster of one CTA.
#pragma once

#include "cluster/radix_select.cuh"
#include "cluster/row_job.cuh"
#include "core/row_report.cuh"
#include "fallback/radix_fallback.cuh"
#include "paper_gvr/refine.cuh"
#include "ptx/barrier.cuh"

namespace gvr_topk::paper_gvr {

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    paper_gvr_topk(const __grid_constant__ LaunchTraits traits, const __grid_constant__ TopkParams p) {
  if constexpr (!has_family(Family::kPaperGvr, kArch)) {
    __trap();
    return;
  }
  ptx::grid_take_over();
  unsigned char* const memory = ptx::opaque_shared(storage);
  RowJob<T, true> job(p, traits, memory);
  // Up to 64 KiB of an aligned row arrive while its length is read.
  if (threadIdx.x == kThreads - 1 && job.ctx.row.lead == 0 && p.width >= kPerVec<T>)
    ptx::prefetch_to_l2(job.ctx.row.data, min(p.width / kPerVec<T>, 4096) * sizeof(uint4));
  // One thread reads the values that another row or stream may be writing, because branches around block
  // barriers depend on them.
  RowFacts& facts = job.ctx.shared->facts;
  if (threadIdx.x == 0) {
    facts.slot = job.slot(p, traits);
    facts.state = facts.slot >= 0 && p.state != nullptr ? *state_of(p, facts.slot) : no_state();
  }
  PaperShared& own = *reinterpret_cast<PaperShared*>(memory);
  own.bins.clear_set(0, threadIdx.x);
  job.agree_on_length(p, traits);
  ptx::reconverge(job.ctx.zero);
  job.requested_slot = facts.slot;
  if (job.is_short()) return job.write_short(p, traits);

  const HintView hint = job.hint(p, traits);
  GuessSample hinted;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const int s = i * kThreads + threadIdx.x;
    hinted.key[i] = hint.indices != nullptr && s < p.k ? hint.indices[s] : -1;
  }
  PaperContext<T> ctx{job.ctx, own, {job.ctx.row, own.ring, job.ctx.warp, job.ctx.lane}};
  ctx.stream.start();  // The first tiles of the row arrive while the guess is made.
  // As `hinted_key`, but without conditions around the loads, so that they overlap.
  T value[kHintPerThread];
  bool there[kHintPerThread];
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const uint32_t at = hinted.key[i] + static_cast<uint32_t>(hint.offset);
    there[i] = static_cast<int32_t>(hinted.key[i]) >= 0 && at < static_cast<uint32_t>(ctx.row.n);
    value[i] = ctx.row.data[there[i] ? at : 0];
  }
  OutputWriter output;
  StepState* next;
  job.prepare_output(p, traits, output, next);
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i)
    hinted.key[i] = there[i] ? order_key(to_float(value[i])) : kAbsentKey;

  // Guess.
  GuessSample sampled = hinted;
  const Guess first = guess(ctx, sampled, facts.state.z_score, p.quantile_guess);

  // Verify.
  SearchResult result = search(ctx, first, sampled);

  KeyOfRank kth{kAbsentKey, 0};
  int items;
  if (result.done != SearchEnd::kKey) {
    // Collect.
    collect(ctx, result);
    // Refine.
    kth = snap(ctx, result.count);
    items = own.list.emit(ctx, traits, result.count, kth.key, own.sums[2], output);
  } else {
    // Float arithmetic did not settle the search. Radix rounds over the key do, whatever the row holds.
    ptx::reconverge(ctx.zero);  // The search has ended in a branch.
    prepare_exchange(job.ctx);
    __syncthreads();
    int rounds = 0;
    uint32_t exchanges = 0;
    const auto stream = fallback::start_stream(job.ctx);
    const KeyInterval interval =
        fallback::radix_select(job.ctx, stream, KeyInterval::everything(), exchanges, rounds);
    fallback::WarpCounts counts_of_warp;
    const CountResult counted = fallback::verify(job.ctx, stream, interval, 0, counts_of_warp);
    const ListedKeys listed(job.ctx);
    const Threshold threshold = select_kth(job.ctx, interval, listed, counted, kth.scans);
    kth.key = threshold.key;
    items = job.count_items(traits, kth.key, counted.above);
    fallback::emit(job.ctx, stream, interval, listed, counts_of_warp, threshold, items, output);
    result.count = static_cast<int>(counted.inside);
    result.passes += rounds + 1;
    if (interval.lo == interval.hi) result.done = SearchEnd::kTieKey;
    __syncthreads();  // All threads have left the memory that `own` shares.
  }
  job.finish_dropped(p, traits, output, items);

  // The state and the statistics.
  uint32_t counts = 0;  // hinted elements of the row; from bit 16 on, those that reach the k-th key
  hinted.for_each([&](uint32_t x) { counts += x == kAbsentKey ? 0 : x >= kth.key ? (1 << 16) + 1 : 1; });
  counts = block_sum(ctx, own.sums[0], counts).all;
  if (ctx.thread != 0) return;
  const int present = counts & 0xffffu, hits = counts >> 16;
  StepState state = no_state();
  if (present > 0) state.z_score = static_cast<float>(hits) / static_cast<float>(present);
  const bool writes = hint.indices != nullptr || traits.has(LaunchTraits::kStateByRow);
  if (next != nullptr && writes) *next = state;
  if (traits.has(LaunchTraits::kStats)) {
    write_stats(stats_of(p, traits, job.row), job.hint_reason(p, traits, first.source == kGuessHint),
                result.passes, result.count, kth.scans, hint.indices != nullptr ? hits : -1, first.source,
                result.done == SearchEnd::kGuess, static_cast<int>(result.done));
  }
}

}  // namespace gvr_topk::paper_gvr
