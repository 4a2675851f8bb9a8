// Finishes rows whose guessed intervals have missed in the resident kernel. The row lies in shared memory,
// and nothing is read from global memory again, unless CTAs have not agreed.
#pragma once

#include "cluster/guess.cuh"
#include "cluster/predictor.cuh"
#include "cluster/radix_select.cuh"
#include "cluster/row_job.cuh"
#include "resident/count_and_emit.cuh"

namespace gvr_topk::resident {

// Takes the row from shared memory again, laid out as it was when its interval missed.
template <typename T, int kValues, bool kOptions>
GVR_DEVICE ClusterTile<T, kValues> restore_tile(const TopkParams& p, const LaunchTraits& traits,
                                                RowJob<T, kOptions>& job) {
  const MissedGuess& missed = job.ctx.shared->missed;
  job.ctx.warp = __shfl_sync(0xffffffffu, job.ctx.warp, 0);  // The compiler then knows what a warp shares.
  job.ctx.row.n = missed.length;
  ClusterTile<T, kValues> tile(job.ctx, traits);
  if (missed.elements != p.width) tile.stage_in_second_area(job.ctx, traits);
  tile.lay_out(job.ctx, missed.elements);
  tile.load(job.ctx);
  return tile;
}

// Finishes a row whose k-th value is -inf according to the headers. All greater elements are selected, and
// the first of the others in index order. The counts of each CTA give its numbers of both.
template <typename T, int kValues, bool kOptions>
__device__ __noinline__ void resolve_miss_masked(const TopkParams& p, const LaunchTraits& traits) {
  using Tile = ClusterTile<T, kValues>;
  RowJob<T, kOptions> job(p, traits, storage);
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  const MissedGuess& missed = smem.missed;
  const CountResult& result = missed.result;
  __syncthreads();  // One thread has written `missed`.
  const Tile tile = restore_tile<T, kValues>(p, traits, job);
  const uint32_t greater = result.above + result.inside;
  const int items = job.count_items(traits, kNegInfKey, greater);
  // Listed keys and ties of the earlier CTAs.
  const int log2_warps = log2_of(kWarps) + ctx.log2_ctas, groups = tile.groups_of(ctx, missed.elements);
  const auto first_of = [&](int cta) {
    const int first = (cta * kWarps * groups + (1 << log2_warps) - 1) >> log2_warps;
    return min(max(first * Tile::kGroup - ctx.row.lead, 0), ctx.row.n);
  };
  const Counts& counts = smem.header[ctx.lane & (ctx.ctas - 1)].counts;
  const bool earlier = ctx.lane < ctx.rank;
  const uint32_t in_cta = counts.above + counts.listed + counts.equal;
  const uint32_t ties_in_cta = first_of(ctx.lane + 1) - first_of(ctx.lane) - in_cta;
  const uint32_t listed = __reduce_add_sync(0xffffffffu, earlier ? counts.listed : 0);
  const uint32_t ties_before = __reduce_add_sync(0xffffffffu, earlier ? ties_in_cta : 0);
  // Either may exceed 16 bits, so both are added to the offset instead of the packed counts of earlier CTAs.
  const uint32_t ties_taken = min(ties_before, items - greater);
  const Threshold threshold{kNegInfKey, items - greater - ties_taken, ctx.row.n - greater};
  if (ctx.lane == 0) smem.selected[0][ctx.warp] = 0;
  ptx::reconverge(ctx.zero);
  const OutputWriter output = job.output(p, traits);
  StepState* const next = job.next_state_slot(p, traits, output);
  job.count_hint_hits(p, traits, threshold.key);
  const uint32_t selected = tile.not_below(key_to_float(kLeastFiniteKey));
  const int in_tile = min(max(tile.length, 0), tile.vecs * kPerVec<T>);
  const int ahead = tile.ahead(ctx);
  const uint32_t ties = ptx::bit_range(ahead, max(in_tile - ahead, 0)) & ~selected;
  const uint32_t before = result.above_before + listed + ties_taken;
  emit_tile(ctx, missed.interval, threshold, before, tile, selected | ties, ties, output, [&] {
    job.write_state(traits, next, [] { return StepState{kStateMasked, 0.0f, 0.0f, 0}; });
    job.report(p, traits, missed.passes, result.inside, 0, missed.source, false, 0);
  });
  job.finish_dropped(p, traits, output, items);
}

// Finishes any other row: radix rounds over its keys find an interval that holds the k-th key by
// construction, and one exchange follows.
template <typename T, int kValues, bool kOptions, bool kWholeRows>
__device__ __noinline__ void resolve_miss_resident(const TopkParams& launch_params,
                                                   const LaunchTraits& launch_traits) {
  const TopkParams constants = ptx::kernel_parameter(launch_params);
  // Generic kernels with 32 elements per thread have no registers left for them.
  const TopkParams& p = kOptions ? launch_params : constants;
  const LaunchTraits traits = ptx::kernel_parameter(launch_traits).out_of_line<kOptions, kWholeRows>();
  RowJob<T, kOptions> job(p, traits, storage);
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  const MissedGuess& missed = smem.missed;
  restart_counts(ctx);
  const ClusterTile<T, kValues> tile = restore_tile<T, kValues>(p, traits, job);
  uint32_t key[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const bool there = tile.ahead(ctx) <= i && i < tile.vecs * kPerVec<T> && i < tile.length;
    key[i] = there ? order_key(tile.value[i]) : kAbsentKey;
  }
  uint32_t exchanges = missed.passes;
  int rounds = 0, snaps = 0;
  const KeyInterval range = range_of(missed.result, missed.interval, ctx.k);
  const KeyInterval interval = radix_select(ctx, range, exchanges, rounds, [&](RadixBins& bins) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) bins.add(key[i]);
  });
  clear_selection(ctx);
  __syncthreads();
  const auto above_key = [&](uint32_t bound) {
    return tile.bits_of(
        key, [&](float& sum, uint32_t x, float bit) { ptx::set_bit_if_greater(sum, x, bound, bit); });
  };
  const auto equal_to = [&](uint32_t bound) {
    return tile.bits_of(
        key, [&](float& sum, uint32_t x, float bit) { ptx::set_bit_if_at_most(sum, x - bound, 0, bit); });
  };
  const uint32_t tie_key = interval.tie_key(), above = above_key(interval.hi);
  const uint32_t inside = above_key(interval.lo - 1) & ~above;
  const uint32_t at_tie_key = tie_key != kAbsentKey ? inside & equal_to(tie_key) : 0;
  count_and_list(ctx, tile, tie_key != kAbsentKey, above, at_tie_key, inside & ~at_tie_key);
  OutputWriter output;
  StepState* next = nullptr;
  const CountResult result = exchange_lists(ctx, interval, exchanges & 1, [&] {
    output = job.output(p, traits);
    next = job.next_state_slot(p, traits, output);
  });
  const ListedKeys listed(ctx);
  Threshold threshold = select_kth(ctx, interval, listed, result, snaps);
  const int items = job.count_items(traits, threshold.key, result.above);
  threshold.tie_quota -= ctx.k - items;
  job.count_hint_hits(p, traits, threshold.key);
  count_listed(ctx, listed, threshold);
  const uint32_t selected = above_key(threshold.key - 1);
  const uint32_t ties = threshold.takes_all() ? 0 : equal_to(threshold.key);
  emit_tile(ctx, interval, threshold, result.above_before, tile, selected, ties, output, [&] {
    job.write_state(traits, next,
                    [&] { return next_state(ctx, Moments(missed), threshold.key, interval, result); });
    job.report(p, traits, missed.passes + rounds + 1, result.inside, snaps, missed.source, false, rounds);
  });
  job.finish_dropped(p, traits, output, items);
}

// Starts over after some exchanges, where CTAs have read different lengths or guessed different intervals.
// The length that the first CTA has read decides. The block has waited for all earlier copies.
template <typename T, int kValues, bool kOptions, bool kWholeRows>
__device__ __noinline__ void start_over(const TopkParams& p, const LaunchTraits& traits, uint32_t source,
                                        int exchanges) {
  RowJob<T, kOptions> job(p, traits, storage);
  const RowContext<T>& ctx = job.ctx;
  Shared& smem = *ctx.shared;
  job.ctx.row.n = smem.header[0].length;
  __syncthreads();  // All threads have read the length, and their elements.
  if (job.is_short()) {
    job.write_short(p, traits);
    return;
  }
  ClusterTile<T, kValues>(ctx, traits).fetch(ctx, traits, p.width, p.width);
  CountResult all{};
  all.agreed = all.contains_k = true;
  if (ctx.thread == 0) {
    smem.missed = MissedGuess{
        KeyInterval::everything(), all, exchanges, ctx.row.n, p.width, 0.0f, kTooFewCounted, source};
  }
  resolve_miss_resident<T, kValues, kOptions, kWholeRows>(p, traits);
}

}  // namespace gvr_topk::resident
