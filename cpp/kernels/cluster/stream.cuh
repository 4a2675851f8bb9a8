// Rows longer than a cluster's registers stream through shared memory once. What is at or above the
// bracket's lower end stays behind, in index order, so that the rest of the work is on some hundred
// elements of a CTA.
//
// Like the resident kernel, this one holds the usual way only; `finish` takes the rest: rows whose bracket
// fails or whose candidates are too many, and plateaus inside the bracket.
#pragma once

#include <algorithm>

#include "cluster/general.cuh"
#include "cluster/place.cuh"
#include "cluster/ring.cuh"

namespace gvr_topk::cluster {

inline size_t stream_bytes(const Shape& shape, const Room& room) {
  return std::max(shared_bytes(shape, room),
                  fixed_bytes(shape.list_capacity(), kRingDepth) + room.pool_chunks * kChunkBytes);
}

// Added by each warp to what is listed when candidates are missing: more than all lists hold, and not so much
// that the sum over a cluster wraps.
constexpr uint32_t kPoolWasFull = 1u << 20;

// Counts the candidates above the bracket and lists those inside, here and then in every CTA.
template <typename T, typename Meanwhile>
__device__ __forceinline__ Verdict exchange(const Task<T>& task, const Bracket& bracket, const Pool& pool,
                                            uint32_t parity, PhaseClock& clock, Meanwhile meanwhile) {
  Shared& sm = *task.shared;
  uint32_t* segment = task.list + task.rank * task.segment;
  const uint32_t plateau = bracket.plateau();
  const float lo = bracket.low(), hi = bracket.high();
  uint32_t above = 0, equal = 0;
  pool.for_each(task.lane, [&](const Kept& x) {
    above += !(x.value <= hi);
    if (!(lo <= x.value && x.value <= hi)) return;
    const uint32_t key = order_key(x.value);
    if (key == plateau) {
      ++equal;
      return;
    }
    const uint32_t slot = atomicAdd(&sm.counts.listed, 1u);
    if (slot < static_cast<uint32_t>(task.segment)) segment[slot] = key;
  });
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (task.lane == 0) {
    ptx::add_shared(sm.counts.above, above, task.zero);
    ptx::add_shared(sm.counts.equal, equal, task.zero);
    if (pool.full) ptx::add_shared(sm.counts.listed, kPoolWasFull, task.zero);
  }
  return exchange_lists(task, bracket, parity, clock, meanwhile);
}

// Writes this CTA's selected positions, in ascending order, at their final place. `report` runs before that,
// when all of the CTA have counted.
template <typename T, typename Report>
__device__ __forceinline__ void emit_pool(const Task<T>& task, const Bracket& bracket, const Listed& listed,
                                          const Cut& cut, uint32_t before, const Pool& pool, const Sink& sink,
                                          PhaseClock& clock, Report report) {
  count_listed(task, listed, cut);
  uint32_t counts = 0;
  const float level = key_to_float(cut.key);
  pool.for_each(task.lane, [&](const Kept& x) { counts += packed_count(x.value, level, cut); });
  counts = __reduce_add_sync(0xffffffffu, counts);
  if (task.lane == 0) task.shared->selected[1][task.warp] = counts;
  __syncthreads();
  clock.stamp();
  report();
  const uint32_t earlier = (1u << task.lane) - 1;
  const Place start(task, bracket, cut, before, 0);
  int next = start.next;
  if (cut.takes_all()) {
    pool.for_each(task.lane, [&](const Kept& x) {
      const uint32_t chosen = __ballot_sync(0xffffffffu, !(x.value < level));
      if (!(x.value < level)) sink.put(next + __popc(chosen & earlier), x.position);
      next += __popc(chosen);
    });
    return;
  }
  uint32_t ties_left = start.ties_left;
  pool.for_each(task.lane, [&](const Kept& x) {
    const uint32_t ties = __ballot_sync(0xffffffffu, x.value == level);
    const uint32_t chosen = __ballot_sync(0xffffffffu, !(x.value <= level));
    const uint32_t tie = __popc(ties & earlier);
    if (!(x.value < level) && (x.value != level || tie < ties_left)) {
      sink.put(next + __popc(chosen & earlier) + static_cast<int>(min(tie, ties_left)), x.position);
    }
    const uint32_t taken = min(static_cast<uint32_t>(__popc(ties)), ties_left);
    next += __popc(chosen) + static_cast<int>(taken);
    ties_left -= taken;
  });
}

// A bracket inside one that holds the k-th key but too many others to list: radix rounds over the
// candidates of the cluster. By value: what has an address does not stay in registers.
template <typename T>
__device__ __noinline__ Bracket divide(const Task<T> task, const Pool pool, const Bracket range) {
  int rounds = 0;
  return radix_bracket(task, range, rounds, [&](uint32_t* hist, uint32_t base, uint32_t reach, int shift) {
    uint32_t above = 0;
    pool.for_each(task.lane, [&](const Kept& x) {
      const uint32_t key = order_key(x.value);
      if (key < base) return;
      if (key - base <= reach) {
        atomicAdd(&hist[(key - base) >> shift], 1u);
      } else {
        ++above;
      }
    });
    return above;
  });
}

// `kLooks`: as in the resident kernel.
template <typename T, int kLooks, Known kKnown>
__global__ void __launch_bounds__(kThreads, 1)
    stream_topk(const __grid_constant__ Shape launch_shape, const __grid_constant__ TopkParams p,
                const __grid_constant__ Room room) {
  extern __shared__ __align__(128) unsigned char storage[];
  const Shape shape = launch_shape.kept<kKnown, false>();
  ptx::grid_take_over();
  Job<T> job(p, shape, room, storage);
  const Task<T>& task = job.task;
  Shared& sm = *task.shared;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> shape.log2_ctas(), job.writer);
  clock.stamp();
  float feedback = job.early_feedback(p, shape);
  __syncwarp();  // or they would be asked for behind what comes now
  Ahead<T, kLooks> ahead(task, shape);
  job.late_feedback(p, shape, feedback);
  prepare_exchange(task);
  if (task.thread == 0) sm.pool_used = kWarps * Pool::share(room.pool_chunks);
  announce(task);
  job.measure(p, shape);
  if (job.finish_short(p, shape)) return;
  if (task.row.n <= p.width >> 2) {  // few of the places looked at lie in the row
    ptx::wait_copies<0>();
    ahead.fetch(task, shape);
  }

  const int span = warp_span(task.row.n, task.log2_ctas, sizeof(T));
  const int begin = min((task.rank * kWarps + task.warp) * span, task.row.n);
  unsigned char* rings = reinterpret_cast<unsigned char*>(task.list + shape.list_capacity());
  const Ring<T> ring(task.row.data + begin, min(span, task.row.n - begin), task.warp, task.lane, rings);
  Feed<T> feed(ring);
  const auto store = reinterpret_cast<Kept*>(rings + kWarps * Ring<T>::kBytes);
  const auto fetch = [&](int first, int last) {
#pragma unroll
    for (int word = first; word < last; ++word) {
      if (task.row.aligned) {
        feed.fetch(ring, word * Ring<T>::kWordBytes);
      } else {
        ptx::commit_copies();
      }
    }
  };
  fetch(0, 1);
  Moments moments;
  RowSampling sampling;
  if (shape.has(Shape::kFed)) {
    fetch(1, kRingDepth);
    ptx::wait_copies<kRingDepth>();
    moments = Moments(task, ahead, feedback);
  } else {
    sampling = sampling_of(task, shape, ahead);
    ptx::wait_copies<1>();
  }
  if (task.ctas > 1) ptx::cluster_wait();
  // A sample first: behind all that the ring can hold it would wait for megabytes.
  Bracket bracket = guess(
      task, shape, moments, [&] { return job.hint(p, shape); }, ahead, sampling, feedback, kWorthlessAlpha,
      [&] {
        if (!shape.has(Shape::kFed)) fetch(1, kRingDepth);
      });
  const uint32_t source = bracket.source;
  clock.stamp();

  const Bracket everything = Bracket::everything();
  if (!task.row.aligned) {
    outlast_samples(task);
    fall_back<T>(p, launch_shape, room, storage, Start{Attempt::kGuess, bracket, everything, source, 0});
    return;
  }
  Pool pool(store, sm.pool_chunks[task.warp], room.pool_chunks, task.warp, task.lane);
  // A plateau may be most of the row. That is for `finish`, but only once all CTAs are known to agree: where
  // the hint is being written, they may have read different ones.
  pool.full = bracket.plateau() != kAbsentKey;
  if (pool.full) {
    ptx::wait_copies<0>();
  } else {
    sift(task, ring, feed, bracket.low(), pool);
  }
  Sink sink;
  float* next = nullptr;
  Verdict verdict = exchange(task, bracket, pool, 0, clock, [&] {
    sink = job.sink(p, shape);
    sink.keep(shape);
    next = job.next_feedback(p, shape, sink);
    if (shape.has(Shape::kLeaving)) ptx::keep(next);
  });
  int passes = 1;
  bool guess_hit = verdict.holds;
  if (!verdict.holds) {
    // As long as all candidates of the cluster were kept, what lies above the bracket's lower end is known.
    const bool kept = verdict.counted && verdict.inside < kPoolWasFull;
    const bool above = kept && verdict.above >= static_cast<uint32_t>(task.k);
    bool again = above && move_bracket(task, verdict, bracket);
    if (kept && verdict.contains) {
      bracket = divide(task, pool, bracket);
      __syncthreads();  // all have read the sums
      sm.keys.template clear<kThreads>();
      again = true;
    }
    if (again) {
      start_again(task);
      verdict = exchange(task, bracket, pool, 1, clock, [] {});
      ++passes;
    }
    if (!verdict.holds) {
      // What was not kept is read again: for the same bracket, one further down, or everything.
      Attempt attempt = Attempt::kRadix;
      if (verdict.counted && bracket.plateau() != kAbsentKey) {
        attempt = Attempt::kGuess;
      } else if (!again && move_bracket(task, verdict, bracket)) {
        attempt = Attempt::kMoved;
      }
      __syncthreads();  // the pool's place is used anew
      fall_back<T>(p, launch_shape, room, storage, Start{attempt, bracket, everything, source, passes});
      return;
    }
  }
  clock.stamp();

  int snaps = 0;
  const Listed listed(task);
  const Cut cut = kth_key(task, bracket, listed, verdict, snaps);
  clock.stamp();
  job.audit(p, shape, cut.key);
  emit_pool(task, bracket, listed, cut, verdict.before, pool, sink, clock, [&] {
    if (job.is_least_busy() && next != nullptr) {
      *next = moments.next<kLooks>(task, feedback, cut.key, bracket, verdict);
    }
    job.report(p, shape, passes, verdict.inside, snaps, source, guess_hit, 0);
  });
  clock.stamp();
}

}  // namespace gvr_topk::cluster
