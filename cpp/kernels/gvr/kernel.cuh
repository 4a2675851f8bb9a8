// The paper's kernel, exact: guess, verify, collect, refine, one CTA of 512 threads per row.
#pragma once

#include "gvr/refine.cuh"

namespace gvr_topk::gvr {

constexpr size_t kRingBytes = kRingDepth * kThreads * cluster::kWordBytes;
static_assert(sizeof(Candidates) <= kRingBytes);

// The ring is behind the cluster kernel's list, whether that kernel would want one or not.
inline size_t block_bytes(const cluster::Shape& shape, const cluster::Room& room) {
  return sizeof(Shared) + cluster::shared_bytes(shape, room) +
         (shape.has(cluster::Shape::kRing) ? 0 : kRingBytes);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    four_phase_topk(const __grid_constant__ cluster::Shape shape, const __grid_constant__ TopkParams p,
                    const __grid_constant__ cluster::Room room) {
  extern __shared__ __align__(128) unsigned char storage[];
  ptx::grid_dependency_wait();
  Shared& sm = *reinterpret_cast<Shared*>(storage);
  const int row = blockIdx.x;
  const int request = cluster::request_of(p, shape, row);
  cluster::Task<T> task = cluster::make_task<T>(
      p, shape, room, row_buffer<T>(p, shape.has(cluster::Shape::kAligned), row), storage + sizeof(Shared));
  // One thread reads what another row, or stream, may be writing: branches around barriers depend on it.
  cluster::RowFacts& facts = task.shared->facts;
  if (threadIdx.x == 0) {
    facts.length = visible_length(p, cluster::next_n_of(p, shape), row, request, p.seq_lens[request]);
    facts.slot = cluster::checked_slot(p, shape, cluster::asked_slot(p, shape, row, request));
    const bool fed = facts.slot >= 0 && p.guess_state != nullptr;
    facts.feedback = fed ? *cluster::feedback_of(p, facts.slot) : cluster::nothing();
  }
  __syncthreads();
  const int slot = facts.slot;
  const float alpha = facts.feedback.place;
  task.measure(facts.length);
  uint4* const ring = static_cast<uint4*>(task.list.end(shape.list_capacity()));
  const Sink sink = cluster::make_sink(p, cluster::next_n_of(p, shape), row, request, slot);
  PhaseClock clock(p.phase_clocks, row, threadIdx.x == 0);
  clock.stamp();
  int32_t* const stats = cluster::stats_of(p, shape, row);
  if (task.row.n <= task.k) {
    cluster::finish_short_row(sink, task.row.n, task.k, threadIdx.x, kThreads, stats);
    return;
  }

  const int32_t* prior = cluster::hint_view(p, slot).prior;
  int32_t position[kHintPerThread];
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const int s = i * kThreads + threadIdx.x;
    position[i] = prior != nullptr && s < task.k ? prior[s] : -1;
  }
  // The first words arrive while the hint is looked at.
  const Stream<T> stream(task.row, task.warp, task.lane, ring);
  stream.start();
  Block block(sm);
  clear(sm.guess);
  clear(sm.snap);
  if (threadIdx.x == 0) sm.guess.members = sm.snap.members = 0;
  T value[kHintPerThread];
  bool in_row[kHintPerThread];
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const int64_t at = static_cast<int64_t>(position[i]) + p.prior_offset;
    in_row[i] = position[i] >= 0 && at >= 0 && at < task.row.n;
    value[i] = task.row.data[in_row[i] ? at : 0];
  }
  Sampled sampled;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    sampled.key[i] = in_row[i] ? order_key(to_float(value[i])) : kAbsentKey;
  }
  const Sampled hinted = sampled;  // the guess may put a sample of the row in its place
  const Guess first = guess(block, task, sampled, alpha, p.quantile_guess);
  clock.stamp();

  Found found = search(block, task, stream, first, sampled);
  clock.stamp();

  uint32_t kth;
  int candidates = found.count, scans = 0, passes = found.passes;
  if (found.done != Done::kKey) {
    Candidates& list = *reinterpret_cast<Candidates*>(ring);
    collect(block, stream, found, list);
    __syncthreads();
    const Held held(block, task.row, found.count, list);
    clock.stamp();
    const Snap snapped = snap(block, held, list, found.count, task.k);
    kth = snapped.key;
    scans = snapped.scans;
    partition(block, held, list, task.k, kth, sink);
  } else {
    // Floats did not settle it: radix rounds over the key do, whatever the row holds.
    Word<T> word;
    if (task.steps == 1) load_word(task.row, task.begin, task.end, task.lane, word);
    cluster::reset_counters(task);
    __syncthreads();
    int rounds = 0;
    uint32_t exchanges = 0;
    const cluster::Bracket bracket =
        cluster::radix_bracket(task, word, cluster::Bracket::everything(), exchanges, rounds);
    if (threadIdx.x == 0) cluster::reset_lists(task);
    __syncthreads();
    const cluster::Verdict verdict = cluster::verify(task, bracket, word, 0, clock);
    const cluster::Listed listed(task);
    kth = cluster::kth_key(task, bracket, listed, verdict, scans).key;
    cluster::emit(task, bracket, listed, kth, verdict, word, sink, clock);
    candidates = static_cast<int>(verdict.inside);
    passes += rounds + 1;
    if (bracket.lo == bracket.hi) found.done = Done::kPlateau;
  }
  clock.stamp();
  ptx::grid_launch_dependents();

  if (prior == nullptr && stats == nullptr) return;
  uint32_t hinted_in_row = 0, at_or_above = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    hinted_in_row += hinted.key[i] != kAbsentKey;
    at_or_above += hinted.key[i] != kAbsentKey && hinted.key[i] >= kth;
  }
  block.template leave<Reduce::kAdd>(0, hinted_in_row);
  block.template leave<Reduce::kAdd>(1, at_or_above);
  block.meet();
  hinted_in_row = block.template take<Reduce::kAdd>(0);
  at_or_above = block.template take<Reduce::kAdd>(1);
  if (threadIdx.x != 0) return;
  if (p.guess_state != nullptr && sink.leaves && prior != nullptr) {
    const float share = hinted_in_row > 0
                            ? static_cast<float>(at_or_above) / static_cast<float>(hinted_in_row)
                            : cluster::kNoFeedback;
    *cluster::feedback_of(p, slot) = cluster::Feedback{share, 0.0f, 0.0f, 0};
  }
  if (stats != nullptr) {
    cluster::write_stats(stats, Path::kGvr, passes, candidates, scans,
                         prior != nullptr ? static_cast<int>(at_or_above) : -1, first.source,
                         found.done == Done::kGuess, static_cast<int>(found.done));
  }
}

}  // namespace gvr_topk::gvr
