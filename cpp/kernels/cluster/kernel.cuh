// The row stays on chip: one cluster of 1 to 16 CTAs keeps a row in registers (longer rows stream
// through once and leave two bits an element), so global memory is read once and one cluster barrier
// joins the CTAs. A bracket that misses costs radix rounds over the registers, never a wrong result.
//
// Grid: rows * ctas CTAs of 512 threads, clusters of `ctas` along x; cluster r works on row r.
#pragma once

#include "cluster/emit.cuh"
#include "cluster/guess.cuh"
#include "cluster/radix.cuh"
#include "cluster/refine.cuh"
#include "cluster/state.cuh"
#include "cluster/verify.cuh"

namespace gvr_topk::cluster {

struct Shape {
  int list_capacity;
  int mask_words;
  bool use_guess;
};

__host__ __device__ inline size_t shared_bytes(const Shape& shape, int ctas) {
  const size_t locations = shape.mask_words > 0 ? shape.list_capacity / ctas : 0;
  return sizeof(Shared) + 4 * (shape.list_capacity + locations + 2 * size_t(shape.mask_words));
}

template <typename T>
__device__ __forceinline__ Task<T> make_task(const TopkParams& p, const Shape& shape, int row,
                                             unsigned char* storage) {
  Task<T> task;
  task.row = row_view<T>(p, row);
  task.k = p.k;
  task.rank = ptx::cluster_rank();
  task.ctas = ptx::cluster_size();
  task.lane = threadIdx.x & 31;
  task.warp = threadIdx.x >> 5;
  const int n = max(task.row.n, 0);
  const int span = static_cast<int>(warp_span(n, task.ctas, sizeof(T)));
  task.begin = min(n, (task.rank * kWarps + task.warp) * span);
  task.end = min(n, task.begin + span);
  task.steps = steps_of(span);
  task.shared = reinterpret_cast<Shared*>(storage);
  task.list = reinterpret_cast<uint32_t*>(storage + sizeof(Shared));
  task.segment = shape.list_capacity / task.ctas;
  task.above_mask = task.list + shape.list_capacity;
  task.inside_mask = task.above_mask + shape.mask_words;
  task.location = task.inside_mask + shape.mask_words;
  return task;
}

// Counts how many hinted values lie in the row and at or above the k-th; `hint` is still the old one.
template <typename T>
__device__ __forceinline__ void audit_hint(const Task<T>& task, const HintView& hint, uint32_t kth) {
  uint32_t hinted = 0, at_or_above = 0;
  for (int i = threadIdx.x; i < task.k; i += kThreads) {
    const uint32_t x = hinted_key(task, hint, i);
    hinted += x != kAbsentKey;
    at_or_above += x >= kth;
  }
  atomicAdd(&task.shared->hinted, __reduce_add_sync(__activemask(), hinted));
  atomicAdd(&task.shared->at_or_above, __reduce_add_sync(__activemask(), at_or_above));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    cluster_topk(const __grid_constant__ TopkParams p, const Shape shape) {
  extern __shared__ __align__(16) unsigned char storage[];
  ptx::grid_dependency_wait();
  const int row = blockIdx.x / ptx::cluster_size();
  const Task<T> task = make_task<T>(p, shape, row, storage);
  Shared& sm = *task.shared;
  const bool writer = task.rank == 0 && threadIdx.x == 0;
  int slot = -1;
  if (p.prior != nullptr) slot = p.row_slot != nullptr ? p.row_slot[row] : row / p.next_n;
  if (slot >= p.num_slots) slot = -1;
  const Sink sink = make_sink(p, row, slot);
  int32_t* stats = p.stats != nullptr ? p.stats + row * kStatColumns : nullptr;

  if (task.row.n <= task.k) {
    emit_short_row(sink, task.row.n, task.k, task.rank * kThreads + threadIdx.x,
                   task.ctas * kThreads);
    if (stats != nullptr && task.rank == 0 && threadIdx.x < kStatColumns) {
      stats[threadIdx.x] = threadIdx.x == kStatHits ? -1 : 0;
    }
    return;
  }

  uint32_t key[kValuesPerThread];
  if (task.steps == 1) load_word<T>(task.row, task.begin, task.end, task.lane, key);
  if (threadIdx.x < kMaxClusterSize) {
    sm.segment_above[threadIdx.x] = 0;
    sm.segment_equal[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    sm.listed = 0;
    sm.hinted = 0;
    sm.at_or_above = 0;
  }
  // Shared memory of the other CTAs may be touched only once they are known to run. With one CTA the
  // same barrier makes the counters above visible.
  if (task.ctas > 1) ptx::cluster_arrive();
  const HintView hint = hint_view(p, slot);
  uint32_t sample[kSamplesPerThread];
  Bracket bracket{kMinKey, kMaxKey, kGuessNone};
  if (shape.use_guess) bracket = guess(task, hint, sample);
  if (task.ctas > 1) {
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }

  Verdict verdict{};
  uint32_t source = bracket.source;
  int passes = 0, rounds = 0, snaps = 0;
  if (shape.use_guess) {
    verdict = verify(task, bracket, key);
    ++passes;
  }
  const bool guessed = verdict.holds;
  if (!guessed) {
    bracket = radix_bracket(task, key, rounds);
    if (threadIdx.x == 0) sm.listed = 0;
    __syncthreads();
    verdict = verify(task, bracket, key);
    passes += rounds + 1;
  }
  const uint32_t kth = kth_key(task, bracket, verdict, snaps);

  // What share of the hint was at or above the k-th value, for the next step's guess: from the sample
  // when every CTA guessed from the hint, otherwise by looking at the hint before it is overwritten.
  const bool measured = hint.prior != nullptr && (p.guess_state != nullptr || stats != nullptr);
  if (measured) {
    if (verdict.other_source || stats != nullptr) {
      if (task.rank == 0) audit_hint(task, hint, kth);
      cluster_sync(task.ctas);
    } else if (task.rank == 0) {
      uint32_t hinted = 0, at_or_above = 0;
#pragma unroll
      for (int i = 0; i < kSamplesPerThread; ++i) {
        hinted += sample[i] != kAbsentKey;
        at_or_above += sample[i] >= kth;
      }
      hinted = __reduce_add_sync(0xffffffffu, hinted);
      at_or_above = __reduce_add_sync(0xffffffffu, at_or_above);
      if (task.lane == 0) {
        atomicAdd(&sm.hinted, hinted);
        atomicAdd(&sm.at_or_above, at_or_above);
      }
    }
  }
  emit(task, bracket, kth, key, sink);
  ptx::grid_launch_dependents();

  if (!writer) return;
  if (p.guess_state != nullptr && sink.prior != nullptr) {
    p.guess_state[slot] =
        sm.hinted > 0 ? static_cast<float>(sm.at_or_above) / static_cast<float>(sm.hinted) : -1.0f;
  }
  if (stats != nullptr) {
    stats[kStatPath] = static_cast<int>(shape.use_guess ? Path::kCluster : Path::kRadix);
    stats[kStatPasses] = passes;
    stats[kStatCandidates] = verdict.inside;
    stats[kStatSnap] = snaps;
    stats[kStatHits] = hint.prior != nullptr ? static_cast<int>(sm.at_or_above) : -1;
    stats[kStatGuess] = source;
    stats[kStatGuessHit] = guessed;
    stats[kStatDone] = rounds;
  }
}

}  // namespace gvr_topk::cluster
