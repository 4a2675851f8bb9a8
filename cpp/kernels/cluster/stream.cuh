// Rows longer than a cluster's registers stream through shared memory once. What is at or above the
// bracket's lower end stays behind, in index order, so that the rest of the work is on some hundred
// elements of a CTA.
//
// Like the resident kernel, this one holds the usual way only. Where the bracket fails `settle_stream` looks
// at what was kept, and streams the row once more if that is not enough; `fall_back` takes the rest: rows
// whose candidates are too many, and plateaus inside the bracket.
//
// Rows that are not aligned do not come here, but to the general kernel.
#pragma once

#include <algorithm>

#include "cluster/general.cuh"
#include "cluster/masked.cuh"
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
    task.list.put(atomicAdd(&sm.counts.listed, 1u), key);
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

// The last steps of a row whose bracket holds: the k-th key, the result, and what the next step starts from.
// `of_nan`: what is infinity in the pool is NaN in the row.
template <typename T>
__device__ __forceinline__ void conclude(const TopkParams& p, const Shape& shape, const Job<T>& job,
                                         const Bracket& bracket, const Verdict& verdict, const Pool& pool,
                                         const Moments& moments, uint32_t source, int passes, int rounds,
                                         const Sink& sink, Feedback* next, PhaseClock& clock,
                                         bool of_nan = false) {
  const Task<T>& task = job.task;
  clock.stamp();
  int snaps = 0;
  const Listed listed(task);
  const Cut cut = kth_key(task, bracket, listed, verdict, snaps);
  clock.stamp();
  job.audit(p, shape, of_nan ? kMaxKey : cut.key);
  emit_pool(task, bracket, listed, cut, verdict.before, pool, sink, clock, [&] {
    if (job.is_least_busy() && next != nullptr) {
      *next = left_by(task, moments, cut.key, bracket, verdict);
    }
    job.report(p, shape, passes + rounds, verdict.inside, snaps, source, passes == 1, rounds);
  });
  clock.stamp();
}

// A plateau inside the bracket may be most of the row; not of one that is masked nearly everywhere, nor one
// of infinities.
__device__ __forceinline__ bool may_be_dense(const Bracket& bracket) {
  return bracket.plateau() != kAbsentKey && bracket.lo != kLeastFiniteKey && bracket.lo != kPosInfKey;
}

// The rings of all warps, and behind them the store of what is kept.
template <typename T>
__device__ __forceinline__ unsigned char* rings_of(const Task<T>& task, const Shape& shape) {
  return static_cast<unsigned char*>(task.list.end(shape.list_capacity()));
}

template <typename T>
__device__ __forceinline__ Kept* store_of(const Task<T>& task, const Shape& shape) {
  return reinterpret_cast<Kept*>(rings_of(task, shape) + kWarps * Ring<T>::kBytes);
}

template <typename T>
__device__ __forceinline__ Ring<T> ring_of(const Task<T>& task, const Shape& shape) {
  const int span = warp_span(task.row.n, task.log2_ctas, sizeof(T));
  const int begin = min((task.rank * kWarps + task.warp) * span, task.row.n);
  return Ring<T>(task.row.data + begin, min(span, task.row.n - begin), task.warp, task.lane,
                 rings_of(task, shape));
}

template <typename T>
__device__ __forceinline__ Pool pool_of(const Task<T>& task, const Shape& shape, const Room& room) {
  return Pool(store_of(task, shape), task.shared->pool_chunks[task.warp], room.pool_chunks, task.warp);
}

// A row whose bracket has missed. As long as all candidates of the cluster were kept, what lies above the
// bracket's lower end is known: radix rounds over them, then an exchange that is certain to hold. If the k-th
// key lies further down, the row is read again, from a lower bracket.
template <typename T>
__device__ __noinline__ void settle_stream(const TopkParams& p, const Shape& shape, const Room& room,
                                           unsigned char* storage, int count, int turn) {
  Job<T> job(p, shape, room, storage);
  const Task<T>& task = job.task;
  Shared& sm = *task.shared;
  const Missed& missed = sm.missed;
  PhaseClock clock(nullptr, 0, false);
  start_again(task);
  job.task.measure(missed.length);
  Verdict verdict = missed.verdict;
  Bracket bracket = missed.bracket;
  Pool pool = pool_of(task, shape, room);
  pool.count = count;
  pool.turn = turn;
  uint32_t exchanges = missed.passes;
  int passes = missed.passes, rounds = 0;
  bool of_nan = false;
#pragma unroll 1
  while (true) {
    const bool complete = verdict.inside < kPoolWasFull;
    if (complete && is_masked(bracket, verdict, task.k)) {
      const Sink sink = job.sink(p, shape);
      Feedback* const next = job.next_feedback(p, shape, sink);
      job.audit(p, shape, kNegInfKey);
      emit_masked(task, pool, verdict, sink);
      if (job.is_least_busy() && next != nullptr) *next = Feedback{kMasked, 0.0f, 0.0f, 0};
      job.report(p, shape, passes + rounds, verdict.inside, 0, missed.source, false, rounds);
      return;
    }
    const bool is_kept = complete && (verdict.contains || verdict.above >= static_cast<uint32_t>(task.k));
    if (is_kept) {
      const Bracket range = range_of(verdict, bracket, task.k);
      bracket = radix_bracket(task, range, exchanges, rounds, [&](RadixBins& bins) {
        pool.for_each(task.lane, [&](const Kept& x) { bins.add(order_key(x.value)); });
      });
      of_nan = bracket.lo == kMaxKey;
      if (of_nan) {
        pool.keep_nan(task.lane);
        bracket = Bracket::only(kPosInfKey);
      }
    } else {
      if (passes > 1 || !complete) break;
      if (!move_bracket(task, verdict, bracket)) bracket = guess_by_row(task, [] {});
    }
    sm.keys.template clear<kThreads>();
    if (task.thread == 0) {
      reset_lists(task);
      sm.small_count = 0;
      if (!is_kept) sm.pool_used = kWarps * Pool::share(room.pool_chunks);
    }
    __syncthreads();
    if (!is_kept) {
      const Ring<T> ring = ring_of(task, shape);
      Feed<T> feed(ring);
#pragma unroll
      for (int word = 0; word < kRingDepth; ++word) feed.fetch(ring, word * Ring<T>::kWordBytes);
      pool = pool_of(task, shape, room);
      pool.give_out(task.lane);
      pool.full = may_be_dense(bracket);
      if (pool.full) {
        ptx::wait_copies<0>();
      } else {
        sift(task, ring, feed, bracket.low(), pool);
      }
    }
    verdict = exchange(task, bracket, pool, exchanges++ & 1, clock, [] {});
    ++passes;
    if (verdict.holds) {
      const Sink sink = job.sink(p, shape);
      Feedback* const next = job.next_feedback(p, shape, sink);
      conclude(p, shape, job, bracket, verdict, pool, Moments(missed), missed.source, passes, rounds, sink,
               next, clock, of_nan);
      return;
    }
    // CTAs that have sampled a row while it was overwritten go by different brackets.
    if (is_kept || !verdict.counted) break;
    start_again(task);
  }
  // A plateau inside the bracket, or more than could be kept: every element is looked at again.
  const Bracket everything = Bracket::everything();
  const bool try_it = verdict.counted && bracket.plateau() != kAbsentKey;
  __syncthreads();  // the pool's memory is used anew
  fall_back<T>(p, shape, room, storage,
               Start{try_it ? Attempt::kGuess : Attempt::kRadix, bracket, everything, missed.source,
                     static_cast<int>(exchanges), missed.length});
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
  Feedback feedback = job.early_feedback(p, shape);
  __syncwarp();  // or they would be asked for behind what comes now
  // The pool's store is not used before the row is sifted.
  Ahead<T, kLooks> ahead(task, shape, reinterpret_cast<uint4*>(store_of(task, shape)));
  job.late_feedback(p, shape, feedback);
  prepare_exchange(task);
  if (task.thread == 0) sm.pool_used = kWarps * Pool::share(room.pool_chunks);
  announce(task);
  job.agree_on_length(p, shape);
  if (job.is_short()) {
    settle_short(p, launch_shape, room, storage, job, !shape.has(Shape::kFed));
    return;
  }
  if (task.row.n <= p.width >> 2) {  // few of the places looked at lie in the row
    ptx::wait_copies<0>();
    ahead.fetch(task, shape);
  }

  const Ring<T> ring = ring_of(task, shape);
  Feed<T> feed(ring);
  const auto fetch = [&](int first, int last) {
#pragma unroll
    for (int word = first; word < last; ++word) feed.fetch(ring, word * Ring<T>::kWordBytes);
  };
  fetch(0, 1);
  Moments moments;
  Bracket bracket;
  // A sample first: behind all that the ring can hold it would wait for megabytes.
  if (shape.has(Shape::kFed)) {
    fetch(1, kRingDepth);
    ptx::wait_copies<kRingDepth>();
    job.tell_feedback(p, shape, feedback);
    moments = Moments(task, ahead);  // behind whose barrier all have it
    feedback = sm.facts.feedback;
    if (task.ctas > 1) ptx::cluster_wait();
    bracket = guess(task, moments, [&] { return job.hint(p, shape); }, feedback, kWorthlessAlpha, [] {});
  } else {
    const RowSampling sampling = sampling_of(task, shape, ahead);
    ptx::wait_copies<1>();
    if (task.ctas > 1) ptx::cluster_wait();
    bracket = guess_unfed(task, shape, ahead, sampling, [&] { fetch(1, kRingDepth); });
  }
  const uint32_t source = bracket.source;
  clock.stamp();

  Pool pool = pool_of(task, shape, room);
  pool.give_out(task.lane);
  // That is for `fall_back`, but only once all CTAs are known to agree.
  pool.full = may_be_dense(bracket);
  if (pool.full) {
    ptx::wait_copies<0>();
  } else {
    sift(task, ring, feed, bracket.low(), pool);
  }
  Sink sink;
  Feedback* next = nullptr;
  const Verdict verdict = exchange(task, bracket, pool, 0, clock, [&] {
    sink = job.sink(p, shape);
    sink.keep(shape);
    next = job.next_feedback(p, shape, sink);
    if (shape.has(Shape::kLeaving)) ptx::keep(next);
  });
  if (verdict.holds) {
    conclude(p, shape, job, bracket, verdict, pool, moments, source, 1, 0, sink, next, clock);
  } else if (verdict.counted) {
    if (task.thread == 0) {
      sm.missed = Missed{bracket, verdict, 1, task.row.n, 0, moments.mean, moments.deviation, source};
    }
    settle_stream<T>(p, launch_shape, room, storage, pool.count, pool.turn);
  } else {
    start_over(p, launch_shape, room, storage, task, source);
  }
}

}  // namespace gvr_topk::cluster
