// Selects the exact top k in the way of the paper's kernel. This is the documented baseline, and
// gvr_topk.evaluation.paper_reference is its readable model.
//
// Grid: one CTA of 512 threads per row.
//
// Phases (paper, section 4.2):
// - guess: a first threshold comes from the values of this row at the hinted positions (paper_gvr/guess.cuh);
// - verify: passes over the row count the elements that reach a threshold, until there are between k and 6144
//   (paper_gvr/verify.cuh). A pass leaves one bit per element;
// - collect: the positions of those elements are collected in index order (paper_gvr/collect.cuh);
// - refine: the exact k-th value among these elements is found, and the selection is written
//   (paper_gvr/refine.cuh).
//
// If float arithmetic does not settle the search of a row, radix rounds do, as in a cluster of one CTA.
#pragma once

#include "cluster/radix_select.cuh"
#include "cluster/row_job.cuh"
#include "core/phase_clock.cuh"
#include "fallback/radix_fallback.cuh"
#include "paper_gvr/refine.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk::paper_gvr {

constexpr size_t kRingBytes = kRingDepth * kThreads * kLaneTileBytes;
static_assert(sizeof(Candidates) <= kRingBytes);

// The ring follows the key list of the radix rounds, whether or not their plan has a ring.
inline size_t block_bytes(const LaunchTraits& traits, const SmemLayout& layout) {
  return sizeof(PaperShared) + shared_bytes(traits, layout) +
         (traits.has(LaunchTraits::kRing) ? 0 : kRingBytes);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    paper_gvr_topk(const __grid_constant__ LaunchTraits traits, const __grid_constant__ TopkParams p,
                   const __grid_constant__ SmemLayout layout) {
  if constexpr (!has_family(Family::kPaperGvr, kArch)) {
    __trap();
    return;
  }
  ptx::grid_dependency_wait();
  PaperShared& smem = *reinterpret_cast<PaperShared*>(storage);
  const int row = blockIdx.x;
  const int request = request_of(p, traits, row);
  RowContext<T> ctx =
      make_context<T>(p, traits, layout, row_buffer<T>(p, traits.has(LaunchTraits::kAligned), row),
                      storage + sizeof(PaperShared));
  // One thread reads the values that another row or stream may be writing, because branches around block
  // barriers depend on them.
  RowFacts& facts = ctx.shared->facts;
  if (threadIdx.x == 0) {
    const int length = p.seq_lens[traits.has(LaunchTraits::kRowLengths) ? row : request];
    facts.length = visible_length(p, traits, row, request, length);
    if (traits.has(LaunchTraits::kCounts)) p.counts[row] = min(facts.length, p.k);
    facts.slot = checked_slot(p, traits, load_requested_slot(p, traits, row, request));
    const bool fed = facts.slot >= 0 && p.state != nullptr;
    facts.state = fed ? *state_of(p, facts.slot) : no_state();
  }
  __syncthreads();
  const int slot = facts.slot;
  const float hint_share = facts.state.z_score;
  ctx.set_length(facts.length);
  uint4* const ring = static_cast<uint4*>(ctx.list.end(traits.list_capacity()));
  const OutputWriter output =
      make_output_writer<true>(p, traits, next_n_of(p, traits), row, request, slot, true);
  PhaseClock clock(p.phase_clocks, row, threadIdx.x == 0);
  clock.stamp();
  int32_t* const stats = stats_of(p, traits, row);
  HintQuery query{};
  query.enabled = query.aligned = true;  // Rows of any alignment are hinted.
  query.has_state = p.state != nullptr;
  query.slot = slot;
  query.slots = p.num_slots;
  query.length = ctx.row.n;
  query.k = ctx.k;
  query.max_length = kMaxWidth;
  StepState* const next_state = traits.has(LaunchTraits::kStateByRow)
                                    ? reinterpret_cast<StepState*>(p.next_state) + row
                                : output.writes_state ? state_of(p, slot)
                                                      : nullptr;
  if (ctx.row.n <= ctx.k) {
    if (traits.has(LaunchTraits::kDropMasked)) {
      ptx::reconverge(ctx.zero);  // One thread has read the length and the state.
      write_short_dropped_row(p, traits, ctx, row, output);
      if (stats != nullptr && threadIdx.x == 0) write_short_stats(stats, can_use_heuristic(query));
    } else {
      write_short_row(output, ctx.row.n, ctx.k, threadIdx.x, kThreads, stats, can_use_heuristic(query));
    }
    if (traits.has(LaunchTraits::kStateByRow) && threadIdx.x == 0) *next_state = no_state();
    return;
  }

  const int32_t* hint = hint_view(p, slot).indices;
  int32_t position[kHintPerThread];
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const int s = i * kThreads + threadIdx.x;
    position[i] = hint != nullptr && s < ctx.k ? hint[s] : -1;
  }
  // The first tiles of the row arrive while the hinted values are read.
  const PaperStream<T> stream(ctx.row, ctx.warp, ctx.lane, ring);
  stream.start();
  Block block(smem);
  clear(smem.guess);
  clear(smem.snap);
  if (threadIdx.x == 0) smem.guess.members = smem.snap.members = 0;
  T value[kHintPerThread];
  bool in_row[kHintPerThread];
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const int64_t at = static_cast<int64_t>(position[i]) + p.hint_offset;
    in_row[i] = position[i] >= 0 && at >= 0 && at < ctx.row.n;
    value[i] = ctx.row.data[in_row[i] ? at : 0];
  }
  GuessSample sampled;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    sampled.key[i] = in_row[i] ? order_key(to_float(value[i])) : kAbsentKey;
  }
  const GuessSample hinted = sampled;  // The guess may replace `sampled` by a sample of the row.

  // Guess.
  const Guess first = guess(block, ctx, sampled, hint_share, p.quantile_guess);
  clock.stamp();

  // Verify.
  SearchResult result = search(block, ctx, stream, first, sampled);
  clock.stamp();

  uint32_t kth;
  int candidates = result.count, scans = 0, passes = result.passes, items;
  if (result.done != SearchEnd::kKey) {
    // Collect.
    Candidates& list = *reinterpret_cast<Candidates*>(ring);
    collect(block, stream, result, list);
    __syncthreads();
    const ThreadCandidates own(block, ctx.row, result.count, list);
    clock.stamp();
    // Refine.
    const Snap snapped = snap(block, own, list, result.count, ctx.k);
    kth = snapped.key;
    scans = snapped.scans;
    const bool drops_ties = traits.has(LaunchTraits::kDropMasked) && kth == kNegInfKey;
    items = partition(block, own, list, ctx.k, kth, drops_ties, output);
  } else {
    // Float arithmetic did not settle the search. Radix rounds over the key do, whatever the row holds.
    Tile<T> tile;
    if (ctx.steps == 1) load_tile(ctx.row, ctx.begin, ctx.end, ctx.lane, tile);
    ptx::reconverge(ctx.zero);  // Some lanes have loaded single elements.
    reset_counters(ctx);
    __syncthreads();
    int rounds = 0;
    uint32_t exchanges = 0;
    const KeyInterval interval = radix_select(ctx, tile, KeyInterval::everything(), exchanges, rounds);
    if (threadIdx.x == 0) reset_counts(ctx);
    __syncthreads();
    const CountResult counted = fallback::verify(ctx, interval, tile, 0, clock);
    const ListedKeys listed(ctx);
    kth = select_kth(ctx, interval, listed, counted, scans).key;
    items = count_items(traits, ctx.k, kth, counted.above);
    fallback::emit(ctx, interval, listed, kth, items, counted, tile, output, clock);
    candidates = static_cast<int>(counted.inside);
    passes += rounds + 1;
    if (interval.lo == interval.hi) result.done = SearchEnd::kTieKey;
  }
  finish_dropped_row(p, traits, ctx, row, output, items);
  clock.stamp();
  ptx::grid_launch_dependents();

  const bool by_row = traits.has(LaunchTraits::kStateByRow);
  if (hint == nullptr && stats == nullptr && !by_row) return;
  uint32_t hinted_in_row = 0, at_or_above = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    hinted_in_row += hinted.key[i] != kAbsentKey;
    at_or_above += hinted.key[i] != kAbsentKey && hinted.key[i] >= kth;
  }
  block.template store_partial<Reduce::kAdd>(0, hinted_in_row);
  block.template store_partial<Reduce::kAdd>(1, at_or_above);
  block.sync();
  hinted_in_row = block.template reduce<Reduce::kAdd>(0);
  at_or_above = block.template reduce<Reduce::kAdd>(1);
  if (threadIdx.x != 0) return;
  if (next_state != nullptr && (hint != nullptr || by_row)) {
    const float share = hinted_in_row > 0
                            ? static_cast<float>(at_or_above) / static_cast<float>(hinted_in_row)
                            : kStateUnknown;
    *next_state = StepState{share, 0.0f, 0.0f, 0};
  }
  if (stats != nullptr) {
    query.known = first.source == kGuessHint;
    write_stats(stats, can_use_heuristic(query), passes, candidates, scans,
                hint != nullptr ? static_cast<int>(at_or_above) : -1, first.source,
                result.done == SearchEnd::kGuess, static_cast<int>(result.done));
  }
}

}  // namespace gvr_topk::paper_gvr
