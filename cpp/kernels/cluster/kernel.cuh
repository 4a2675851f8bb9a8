// The row stays on chip: one cluster of 1 to 16 CTAs keeps a row in registers (longer rows stream
// through once and leave one bit an element), so global memory is read once and one cluster barrier
// joins the CTAs. A bracket that misses is moved, and if that fails too, radix rounds decide: over the
// registers, or for a longer row over another read of it. The result never depends on the guess.
//
// Grid: rows * ctas CTAs of 512 threads, clusters of `ctas` along x; cluster r works on row r.
#pragma once

#include "cluster/emit.cuh"
#include "cluster/guess.cuh"
#include "cluster/radix.cuh"
#include "cluster/refine.cuh"
#include "cluster/state.cuh"
#include "cluster/verify.cuh"
#include "common/phase_clock.cuh"

namespace gvr_topk::cluster {

constexpr size_t kWordBytes = 4 * kValuesPerThread;  // of the widest dtype

// Shared-memory layout of a launch.
struct Shape {
  int log2_ctas;
  int list_capacity;
  int candidate_capacity;
  int masks;  // selection masks of one CTA; 0 when rows fit in registers
  bool ring;
  bool use_guess;
};

inline Shape make_shape(const Plan& plan, bool use_guess) {
  return Shape{log2_of(plan.ctas_per_row), plan.list_capacity, plan.candidate_capacity, plan.masks,
               plan.ring_depth > 0,        use_guess};
}

__host__ __device__ inline size_t shared_bytes(const Shape& shape) {
  return sizeof(Shared) + sizeof(Candidate) * shape.candidate_capacity +
         sizeof(uint32_t) * shape.list_capacity + (shape.ring ? kRingDepth * kThreads * kWordBytes : 0) +
         sizeof(uint16_t) * shape.masks;
}

template <typename T>
__device__ __forceinline__ Task<T> make_task(const TopkParams& p, const Shape& shape, int row, int request,
                                             unsigned char* storage) {
  Task<T> task;
  task.row = row_view<T>(p, row, request);
  task.k = p.k;
  task.rank = shape.log2_ctas > 0 ? ptx::cluster_rank() : 0;
  task.log2_ctas = shape.log2_ctas;
  task.ctas = 1 << shape.log2_ctas;
  task.lane = threadIdx.x & 31;
  task.warp = threadIdx.x >> 5;
  const int n = max(task.row.n, 0);
  const int span = warp_span(n, task.log2_ctas, sizeof(T));
  task.steps = steps_of(span);
  if (task.steps == 1) {
    task.begin = min(n, (task.rank * kWarps + task.warp) * span);
    task.end = min(n, task.begin + span);
  } else {
    const int share = task.steps * kStepElements;
    task.begin = min(n, task.rank * share + task.warp * kWordElements);
    task.end = min(n, (task.rank + 1) * share);
  }
  task.shared = reinterpret_cast<Shared*>(storage);
  task.candidates = reinterpret_cast<Candidate*>(storage + sizeof(Shared));
  task.candidate_capacity = shape.candidate_capacity;
  task.list = reinterpret_cast<uint32_t*>(task.candidates + shape.candidate_capacity);
  task.segment = shape.list_capacity >> task.log2_ctas;
  uint4* ring = reinterpret_cast<uint4*>(task.list + shape.list_capacity);
  task.ring = shape.ring ? ring : nullptr;
  task.masks = reinterpret_cast<uint16_t*>(shape.ring ? ring + kRingDepth * kThreads * Word<T>::kVecs : ring);
  return task;
}

// Adds to the block's counts how many of these hinted values lie in the row, and how many of those at or
// above the k-th.
template <typename T, int kCount>
__device__ __forceinline__ void count_hint(const Task<T>& task, const uint32_t (&hinted)[kCount],
                                           uint32_t kth) {
  uint32_t in_row = 0, at_or_above = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    in_row += hinted[i] != kAbsentKey;
    at_or_above += hinted[i] >= kth;
  }
  in_row = __reduce_add_sync(0xffffffffu, in_row);
  at_or_above = __reduce_add_sync(0xffffffffu, at_or_above);
  if (task.lane != 0) return;
  atomicAdd(&task.shared->hinted, in_row);
  atomicAdd(&task.shared->at_or_above, at_or_above);
}

// The same for the whole hint, which is still the old one.
template <typename T>
__device__ __forceinline__ void audit_hint(const Task<T>& task, const HintView& hint, uint32_t kth) {
  for (int first = 0; first < task.k; first += kThreads) {
    const int i = first + threadIdx.x;
    const uint32_t hinted[1] = {i < task.k ? hinted_key(task, hint, hint.prior[i]) : kAbsentKey};
    count_hint(task, hinted, kth);
  }
}

__device__ __forceinline__ int slot_of(const TopkParams& p, int row, int request) {
  if (p.prior == nullptr) return -1;
  const int slot = p.row_slot != nullptr ? p.row_slot[row] : request;
  return slot < p.num_slots ? slot : -1;
}

__device__ __forceinline__ void write_stats(int32_t* stats, Path path, int passes, int candidates, int snaps,
                                            int hits, int guess, bool guess_hit, int done) {
  stats[kStatPath] = static_cast<int32_t>(path);
  stats[kStatPasses] = passes;
  stats[kStatCandidates] = candidates;
  stats[kStatSnap] = snaps;
  stats[kStatHits] = hits;
  stats[kStatGuess] = guess;
  stats[kStatGuessHit] = guess_hit;
  stats[kStatDone] = done;
}

template <typename T>
__device__ __forceinline__ void reset_lists(const Task<T>& task) {
  task.shared->listed = 0;
  task.shared->above = 0;
  task.shared->equal = 0;
}

template <typename T>
__device__ __forceinline__ void reset_counters(const Task<T>& task) {
  Shared& sm = *task.shared;
  if (threadIdx.x < kMaxClusterSize) {
    sm.segment_above[threadIdx.x] = 0;
    sm.segment_equal[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    reset_lists(task);
    sm.hinted = 0;
    sm.at_or_above = 0;
    if (task.ctas > 1) ptx::mailbox_init(ptx::shared_address(&sm.mailbox), task.ctas);
  }
}

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

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    cluster_topk(const __grid_constant__ TopkParams p, const Shape shape) {
  extern __shared__ __align__(16) unsigned char storage[];
  ptx::grid_dependency_wait();
  const int row = blockIdx.x >> shape.log2_ctas;
  const int request = p.next_n == 1 ? row : row / p.next_n;
  const int slot = slot_of(p, row, request);
  const HintView hint = hint_view(p, slot);
  const Task<T> task = make_task<T>(p, shape, row, request, storage);
  Shared& sm = *task.shared;
  const bool writer = task.rank == 0 && threadIdx.x == 0;
  PhaseClock clock(p.phase_clocks, row, writer);
  clock.stamp();
  const Sink sink = make_sink(p, row, request, slot);
  int32_t* stats = p.stats != nullptr ? p.stats + row * kStatColumns : nullptr;

  if (task.row.n <= task.k) {
    emit_short_row(sink, task.row.n, task.k, task.rank * kThreads + threadIdx.x, task.ctas * kThreads);
    if (stats != nullptr && task.rank == 0 && threadIdx.x < kStatColumns) {
      stats[threadIdx.x] = threadIdx.x == kStatHits ? -1 : 0;
    }
    return;
  }

  Word<T> word;
  if (task.steps == 1) load_word(task.row, task.begin, task.end, task.lane, word);
  reset_counters(task);
  __syncthreads();
  // Shared memory of the other CTAs may be touched only once they are known to run.
  if (task.ctas > 1) ptx::cluster_arrive_relaxed();
  uint32_t hinted[kHintSamplesPerThread];
  gather_hint(task, hint, hinted);
  Bracket bracket = shape.use_guess ? guess(task, hint, hinted) : guess_from_row(task);
  if (task.ctas > 1) ptx::cluster_wait();
  clock.stamp();

  const uint32_t source = bracket.source;
  Attempt attempt = shape.use_guess ? Attempt::kGuess : Attempt::kRadix;
  Bracket range = shape.use_guess ? Bracket{kMinKey, kMaxKey, kGuessNone} : bracket;
  Verdict verdict;
  int passes = 0, rounds = 0, snaps = 0;
#pragma unroll 1
  while (true) {
    if (attempt == Attempt::kRadix) {
      bracket = radix_bracket(task, word, range, rounds);
      if (threadIdx.x == 0) reset_lists(task);
      __syncthreads();
    }
    verdict = verify(task, bracket, word, passes & 1, clock);
    ++passes;
    // What radix rounds found holds by construction.
    if (verdict.holds || attempt == Attempt::kRadix) break;
    if (attempt == Attempt::kGuess && move_bracket(task, verdict, bracket)) {
      attempt = Attempt::kMoved;
      if (threadIdx.x == 0) reset_lists(task);
      cluster_sync(task.ctas);  // nobody reads the headers any more
    } else {
      attempt = Attempt::kRadix;
      // A crowd too large to list, but known to hold the k-th key, is all that needs to be divided.
      if (verdict.contains) range = bracket;
    }
  }
  passes += rounds;
  clock.stamp();
  const Listed listed(task);
  const uint32_t kth = kth_key(task, bracket, listed, verdict, snaps);
  clock.stamp();

  // What share of the hint was at or above the k-th value, for the next step's guess: of its sample, or,
  // when statistics are wanted, of all of it, which has to be looked at before it is overwritten.
  if (hint.prior != nullptr && stats != nullptr) {
    if (task.rank == 0) audit_hint(task, hint, kth);
    cluster_sync(task.ctas);
  } else if (task.rank == 0) {
    count_hint(task, hinted, kth);
  }
  emit(task, bracket, listed, kth, verdict, word, sink, clock);
  clock.stamp();
  ptx::grid_launch_dependents();

  if (!writer) return;
  if (p.guess_state != nullptr && sink.prior != nullptr) {
    p.guess_state[slot] =
        sm.hinted > 0 ? static_cast<float>(sm.at_or_above) / static_cast<float>(sm.hinted) : -1.0f;
  }
  if (stats != nullptr) {
    write_stats(stats, shape.use_guess ? Path::kCluster : Path::kRadix, passes, verdict.inside, snaps,
                hint.prior != nullptr ? static_cast<int>(sm.at_or_above) : -1, source,
                attempt == Attempt::kGuess, rounds);
  }
}

}  // namespace gvr_topk::cluster
