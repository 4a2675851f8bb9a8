// Whatever the row holds: plateaus, rows that are not aligned, any k, brackets that fail. The other kernels
// hold the usual way only, in code kept short, and hand the rest to `finish`; this kernel serves what they
// cannot start.
//
// A row of more than a word per warp streams through and leaves one bit an element. A bracket that misses is
// moved, and if that fails too, radix rounds decide. The result never depends on the guess.
//
// Grid: rows * ctas CTAs of 512 threads, clusters of `ctas` along x; cluster r works on row r.
#pragma once

#include "cluster/emit.cuh"
#include "cluster/job.cuh"
#include "cluster/radix.cuh"
#include "cluster/refine.cuh"
#include "cluster/verify.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::cluster {

template <typename T>
__device__ __forceinline__ void emit(const Task<T>& task, const Bracket& bracket, const Listed& listed,
                                     uint32_t kth, const Verdict& verdict, Word<T>& word, const Sink& sink,
                                     PhaseClock& clock) {
  if (verdict.collected <= static_cast<uint32_t>(task.candidate_capacity)) {
    emit_candidates(task, bracket, listed, kth, verdict.collected, sink, clock);
  } else {
    emit_elements(task, bracket, listed, kth, word, sink, clock);
  }
}

// Where the bracket in use comes from.
enum class Attempt { kGuess, kMoved, kRadix };

// What is known of a row when its bracket is looked at.
struct Start {
  Attempt attempt;
  Bracket bracket;  // to try; unused by radix rounds
  Bracket range;    // where radix rounds start
  uint32_t source;  // of the guess
  int passes;       // so far
};

// Everything after the first guess, whatever the row holds.
template <typename T>
__device__ __forceinline__ void finish(const TopkParams& p, const Shape& shape, const Job<T>& job,
                                       uint32_t hinted, Word<T>& word, Start start, PhaseClock& clock) {
  const Task<T>& task = job.task;
  Attempt attempt = start.attempt;
  Bracket bracket = start.bracket, range = start.range;
  Verdict verdict;
  int passes = start.passes, rounds = 0, snaps = 0;
#pragma unroll 1
  while (true) {
    if (attempt == Attempt::kRadix) {
      bracket = radix_bracket(task, word, range, rounds);
      if (task.thread == 0) reset_lists(task);
      __syncthreads();
    }
    verdict = verify(task, bracket, word, passes & 1, clock);
    ++passes;
    // What radix rounds found holds by construction.
    if (verdict.holds || attempt == Attempt::kRadix) break;
    if (attempt == Attempt::kGuess && move_bracket(task, verdict, bracket)) {
      attempt = Attempt::kMoved;
      start_again(task);
    } else {
      attempt = Attempt::kRadix;
      // A crowd too large to list, but known to hold the k-th key, is all that needs to be divided.
      if (verdict.contains) range = bracket;
    }
  }
  passes += rounds;
  clock.stamp();
  const Listed listed(task);
  const uint32_t kth = kth_key(task, bracket, listed, verdict, snaps).key;
  clock.stamp();
  job.count(p, shape, hinted, kth);
  const Sink sink = job.sink(p, shape);
  emit(task, bracket, listed, kth, verdict, word, sink, clock);
  clock.stamp();
  float* const next = job.next_feedback(p, shape, sink);
  if (job.writer && next != nullptr) *next = job.share();
  job.report(p, shape, passes, verdict.inside, snaps, start.source, attempt == Attempt::kGuess, rounds);
}

// The rest of a row that the short way of another kernel cannot settle.
template <typename T>
__device__ __noinline__ void fall_back(const TopkParams& p, const Shape& shape, const Room& room,
                                       unsigned char* storage, Start start) {
  Job<T> job(p, shape, room, storage);
  job.measure(p, shape);
  const Task<T>& task = job.task;
  PhaseClock clock(nullptr, 0, false);
  start_again(task);
  const HintView hint = job.hint(p, shape);
  uint32_t hinted = kAbsentKey;
  if (task.rank == 0) hinted = HintedScore<T>(task, hint, sampled_position(task, hint)).key();
  Word<T> word;
  if (task.steps == 1) load_word(task.row, task.begin, task.end, task.lane, word);
  finish(p, shape, job, hinted, word, start, clock);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    general_topk(const __grid_constant__ Shape shape, const __grid_constant__ TopkParams p,
                 const __grid_constant__ Room room) {
  extern __shared__ __align__(128) unsigned char storage[];
  ptx::grid_take_over();
  Job<T> job(p, shape, room, storage);
  const Task<T>& task = job.task;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> shape.log2_ctas(), job.writer);
  clock.stamp();
  reset_counters(task);
  float feedback = job.early_feedback(p, shape);
  job.late_feedback(p, shape, feedback);
  if (task.thread == 0) task.shared->feedback = feedback;
  announce(task);
  __syncthreads();
  const float alpha = task.shared->feedback;
  job.measure(p, shape);
  if (job.finish_short(p, shape)) return;

  Word<T> word;
  if (task.steps == 1) load_word(task.row, task.begin, task.end, task.lane, word);
  const HintView hint = job.hint(p, shape);
  const int32_t sampled = sampled_position(task, hint);
  if (task.ctas > 1) ptx::cluster_wait();
  const uint32_t hinted = HintedScore<T>(task, hint, sampled).key();
  Bracket bracket;
  if (is_usable(task, alpha, kWorthlessAlpha)) {
    bracket = guess_by_hint(task, hinted, alpha, false);
  } else {
    const RowSampling sampling(task, false, task.row.n);
    bracket = guess_by_row(task, sampling, sampling.look(task), false);
  }
  clock.stamp();
  finish(p, shape, job, hinted, word,
         Start{Attempt::kGuess, bracket, Bracket::everything(), bracket.source, 0}, clock);
}

}  // namespace gvr_topk::cluster
