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

// What is known of a row when its bracket is looked at. All CTAs of a cluster know the same.
struct Start {
  Attempt attempt;
  Bracket bracket;  // to try; unused by radix rounds
  Bracket range;    // where radix rounds start
  uint32_t source;  // of the guess
  int passes;       // so far, each with one exchange
  int length;       // of the row
};

// Everything after the first guess, whatever the row holds. False where the CTAs turn out to have read
// different lengths: nothing has been written then.
template <typename T>
__device__ __forceinline__ bool finish(const TopkParams& p, const Shape& shape, const Job<T>& job,
                                       uint32_t hinted, Word<T>& word, Start start, PhaseClock& clock) {
  const Task<T>& task = job.task;
  Attempt attempt = start.attempt;
  Bracket bracket = start.bracket, range = start.range;
  Verdict verdict;
  uint32_t exchanges = start.passes;
  int passes = start.passes, rounds = 0, snaps = 0;
#pragma unroll 1
  while (true) {
    if (attempt == Attempt::kRadix) {
      bracket = radix_bracket(task, word, range, exchanges, rounds);
      if (task.thread == 0) reset_lists(task);
      __syncthreads();
    }
    verdict = verify(task, bracket, word, exchanges++ & 1, clock);
    ++passes;
    if (!verdict.counted && attempt == Attempt::kGuess) return false;
    // What radix rounds found holds by construction.
    if (verdict.holds || attempt == Attempt::kRadix) break;
    start_again(task);
    if (attempt == Attempt::kGuess && move_bracket(task, verdict, bracket)) {
      attempt = Attempt::kMoved;
    } else {
      attempt = Attempt::kRadix;
      // A dense bracket, known to hold the k-th key, is all that needs to be divided.
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
  Feedback* const next = job.next_feedback(p, shape, sink);
  if (job.writer && next != nullptr) *next = Feedback{job.share(), 0.0f, 0.0f, 0};
  job.report(p, shape, passes, verdict.inside, snaps, start.source, attempt == Attempt::kGuess, rounds);
  return true;
}

// The rest of a row that the short way of another kernel cannot settle, from a length that all CTAs know.
template <typename T>
__device__ __noinline__ void fall_back(const TopkParams& p, const Shape& shape, const Room& room,
                                       unsigned char* storage, Start start) {
  Job<T> job(p, shape, room, storage);
  job.task.measure(start.length);
  if (job.is_short()) {
    job.write_short(p, shape);
    return;
  }
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

// Falls back to radix rounds from the length that the cluster's first CTA has read, where CTAs differ.
template <typename T>
__device__ __forceinline__ void start_over(const TopkParams& p, const Shape& shape, const Room& room,
                                           unsigned char* storage, const Task<T>& task, uint32_t source) {
  const Bracket everything = Bracket::everything();
  const int length = task.shared->header[0].length;
  fall_back<T>(p, shape, room, storage, Start{Attempt::kRadix, everything, everything, source, 1, length});
}

// A row that this CTA finds too short to select from. Others may have read another length, and wait: it takes
// part in the exchanges of a first pass, and then knows. `sampled`: samples are exchanged as well.
template <typename T>
__device__ __forceinline__ void settle_short(const TopkParams& p, const Shape& shape, const Room& room,
                                             unsigned char* storage, const Job<T>& job, bool sampled) {
  const Task<T>& task = job.task;
  ptx::wait_copies<0>();  // a block does not end before copies that it has started
  job.write_short(p, shape);
  if (task.ctas == 1) return;
  const Bracket everything = Bracket::everything();
  ptx::cluster_wait();
  if (sampled) send_sample(task, kAbsentKey);
  send_and_wait(task, everything, 0, [] {});
  if (sampled) receive_samples(task);
  if (!read_headers(task, everything).counted) start_over(p, shape, room, storage, task, kGuessNone);
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
  Feedback feedback = job.early_feedback(p, shape);
  job.late_feedback(p, shape, feedback);
  job.tell_feedback(p, shape, feedback);
  announce(task);
  job.agree_on_length(p, shape);
  if (job.is_short()) {
    settle_short(p, shape, room, storage, job, false);
    return;
  }

  Word<T> word;
  if (task.steps == 1) load_word(task.row, task.begin, task.end, task.lane, word);
  const HintView hint = job.hint(p, shape);
  const int32_t sampled = sampled_position(task, hint);
  if (task.ctas > 1) ptx::cluster_wait();
  const uint32_t hinted = HintedScore<T>(task, hint, sampled).key();
  const float alpha = task.shared->facts.feedback.place;
  const Bracket bracket = is_usable(task, alpha, kWorthlessAlpha) ? guess_by_hint(task, hinted, alpha)
                                                                  : guess_by_row(task, [] {});
  clock.stamp();
  const Bracket everything = Bracket::everything();
  const Start start{Attempt::kGuess, bracket, everything, bracket.source, 0, task.row.n};
  if (!finish(p, shape, job, hinted, word, start, clock)) {
    start_over(p, shape, room, storage, task, bracket.source);
  }
}

}  // namespace gvr_topk::cluster
