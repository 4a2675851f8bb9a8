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

namespace gvr_topk::cluster {

inline size_t stream_bytes(const Shape& shape) {
  return std::max(shared_bytes(shape), fixed_bytes(shape) + shape.pool_chunks * kChunkBytes);
}

// Added to what is listed when candidates are missing: more than any list holds.
constexpr uint32_t kPoolWasFull = 1u << 24;

// Candidates of one CTA, each warp's in index order. Warps own consecutive parts of a row, and scores
// bunch: so a warp takes its room in chunks, from one store, as it needs it.
struct Pool {
  Candidate* store;
  uint8_t* chunks;  // [kMaxPoolChunks] of this warp
  int capacity;     // chunks in the store
  int owned = 0;    // chunks of this warp
  int count = 0;    // candidates of this warp
  bool full = false;

  __device__ __forceinline__ Candidate& at(int i) const { return store[chunks[i >> 5] * 32 + (i & 31)]; }

  // Makes room for `added` candidates more; all lanes take part. False when there is none.
  __device__ __forceinline__ bool grow(uint32_t* used, int added, int lane) {
    const int needed = (count + added + 31) >> 5;
    if (needed > owned) {
      const int more = needed - owned;  // at most a word's: fewer than there are lanes
      int first = 0;
      if (lane == 0) first = static_cast<int>(atomicAdd(used, static_cast<uint32_t>(more)));
      first = __shfl_sync(0xffffffffu, first, 0);
      full |= first + more > capacity;
      if (full) return false;
      if (lane < more) chunks[owned + lane] = static_cast<uint8_t>(first + lane);
      owned = needed;
      __syncwarp();
    }
    count += added;
    return true;
  }

  // Calls visit(candidate) for this lane's candidates, 32 of the warp at a time; all lanes take part, some
  // with an absent key.
  template <typename Visit>
  __device__ __forceinline__ void for_each(int lane, Visit visit) const {
    constexpr int kAtOnce = 4;  // so that their loads overlap
#pragma unroll 1
    for (int first = lane; first < count + lane; first += 32 * kAtOnce) {
      Candidate c[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        c[j] = first + 32 * j < count ? at(first + 32 * j) : Candidate{0, kAbsentKey};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first - lane + 32 * j < count) visit(c[j]);
      }
    }
  }
};

// One warp's part of the row on its way through shared memory: words of 16 consecutive elements a lane,
// fetched in coalesced order. Vectors of a lane are rotated so that 16-byte reads of neighbouring lanes
// fall into different banks.
template <typename T>
struct Stream {
  static constexpr int kVecs = Word<T>::kVecs;
  static constexpr int kLog2Vecs = log2_of(kVecs);
  static constexpr uint32_t kWordBytes = 32 * kVecs * sizeof(uint4);
  static constexpr uint32_t kRingBytes = kRingDepth * kWordBytes;

  const T* data;  // of the warp's part
  int length;     // elements of it
  int lane;
  uint32_t ring;            // shared address of this warp's words
  uint32_t fetched[kVecs];  // where, in the first of them, the vectors that this lane fetches go,
  uint32_t held[kVecs];     // and those lie that it holds

  __device__ __forceinline__ Stream(const T* part, int elements, int lane_id, const void* storage)
      : data(part), length(elements), lane(lane_id), ring(ptx::shared_address(storage)) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int c = 32 * j + lane;
      fetched[j] = ring + spot(c >> kLog2Vecs, c & (kVecs - 1));
      held[j] = ring + spot(lane, j);
    }
  }

  __device__ __forceinline__ static uint32_t rotation(int owner) {
    return (owner * kVecs >> 3 & (kVecs - 1)) * sizeof(uint4);
  }
  __device__ __forceinline__ static uint32_t spot(int owner, int vec) {
    return owner * kVecs * sizeof(uint4) + (vec * sizeof(uint4) ^ rotation(owner));
  }

  __device__ __forceinline__ bool is_whole(int step) const { return (step + 1) * kWordElements <= length; }

  // Starts to fetch a word, `slot` bytes into the ring; nothing beyond the end.
  __device__ __forceinline__ void request(int step, uint32_t slot) const {
    const T* from = data + step * kWordElements + lane * kPerVec<T>;
    if (is_whole(step)) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) ptx::copy_async(fetched[j] + slot, from + j * Word<T>::kGroup);
    } else {
      request_end(from, length - step * kWordElements - lane * kPerVec<T>, slot);
    }
    ptx::commit_copies();  // empty groups too: waiting counts groups
  }

  __device__ __forceinline__ void request_end(const T* from, int left, uint32_t slot) const {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int there = left - j * Word<T>::kGroup;
      if (there >= kPerVec<T>) {
        ptx::copy_async(fetched[j] + slot, from + j * Word<T>::kGroup);
      } else if (there > 0) {
        // The end of the row: there may be nothing behind it to read.
#pragma unroll 1
        for (int e = 0; e < there; ++e) {
          ptx::store_shared(fetched[j] + slot + e * sizeof(T), from[j * Word<T>::kGroup + e]);
        }
      }
    }
  }

  // Bits of this lane's elements of a word that has arrived, where `test(value)` holds.
  template <typename Test>
  __device__ __forceinline__ uint32_t bits(int step, uint32_t slot, Test test) const {
    uint32_t found = 0;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const uint4 vec = ptx::load_shared(held[j] + slot);
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        if (test(element<T>(vec, e))) found |= 1u << (j * kPerVec<T> + e);
      }
    }
    if (is_whole(step)) return found;
    const int there = length - step * kWordElements - lane * kValuesPerThread;
    return there >= kValuesPerThread ? found : found & ((1u << max(there, 0)) - 1);
  }

  __device__ __forceinline__ uint32_t key(uint32_t slot, int place) const {
    const uint32_t in_lane = static_cast<uint32_t>(place * sizeof(T)) ^ rotation(lane);
    return order_key(
        to_float(ptx::load_shared_element<T>(ring + slot + lane * kVecs * sizeof(uint4) + in_lane)));
  }
};

// Sum over the earlier lanes, and over all, of counts that are nearly always below eight.
__device__ __forceinline__ uint32_t count_before(uint32_t count, int lane, uint32_t& total) {
  const uint32_t earlier = (1u << lane) - 1;
  uint32_t before = 0;
  total = 0;
  if (__ballot_sync(0xffffffffu, count >= 8) == 0) {
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {
      const uint32_t lanes = __ballot_sync(0xffffffffu, (count >> bit & 1) != 0);
      before += __popc(lanes & earlier) << bit;
      total += __popc(lanes) << bit;
    }
  } else {
    const uint32_t upto = inclusive_scan(count);
    total = __shfl_sync(0xffffffffu, upto, 31);
    before = upto - count;
  }
  return before;
}

// Streams this warp's part and keeps what is not below `lo`.
template <typename T>
__device__ __forceinline__ void sift(const Task<T>& task, const Stream<T>& stream, float lo, Pool& pool) {
  const int first_position = static_cast<int>(stream.data - task.row.data) + task.lane * kValuesPerThread;
  const int steps = (stream.length + kWordElements - 1) / kWordElements;
  uint32_t slot = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::wait_copies<kRingDepth - 1>();
    __syncwarp();
    uint32_t kept = stream.bits(step, slot, [&](float x) { return !(x < lo); });
    if (__ballot_sync(0xffffffffu, kept != 0) != 0) {
      uint32_t total;
      const uint32_t before = count_before(__popc(kept), task.lane, total);
      int next = pool.count + static_cast<int>(before);
      if (!pool.full && pool.grow(&task.shared->pool_used, static_cast<int>(total), task.lane)) {
#pragma unroll 1
        for (; kept != 0; kept &= kept - 1) {
          const int place = __ffs(kept) - 1;
          pool.at(next++) = Candidate{first_position + step * kWordElements + place, stream.key(slot, place)};
        }
      }
    }
    __syncwarp();  // all have read the slot
    stream.request(step + kRingDepth, slot);
    slot += Stream<T>::kWordBytes;
    if (slot == Stream<T>::kRingBytes) slot = 0;
  }
  __syncwarp();
}

// Counts the candidates above the bracket and lists those inside, here and then in every CTA.
template <typename T>
__device__ __forceinline__ Verdict exchange(const Task<T>& task, const Bracket& bracket, const Pool& pool,
                                            uint32_t parity, PhaseClock& clock) {
  Shared& sm = *task.shared;
  uint32_t* segment = task.list + task.rank * task.segment;
  const uint32_t plateau = bracket.plateau();
  uint32_t above = 0, equal = 0;
  pool.for_each(task.lane, [&](const Candidate& c) {
    above += c.key > bracket.hi;
    if (c.key < bracket.lo || c.key > bracket.hi) return;
    if (c.key == plateau) {
      ++equal;
      return;
    }
    const uint32_t slot = atomicAdd(&sm.listed, 1u);
    if (slot < static_cast<uint32_t>(task.segment)) segment[slot] = c.key;
  });
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (task.lane == 0) {
    atomicAdd(&sm.above, above);
    atomicAdd(&sm.equal, equal);
    if (pool.full) atomicAdd(&sm.listed, kPoolWasFull);
  }
  return exchange_lists(task, bracket, parity, clock);
}

// Writes this CTA's selected positions, in ascending order, at their final place.
template <typename T>
__device__ __forceinline__ void emit_pool(const Task<T>& task, const Bracket& bracket, const Listed& listed,
                                          const Cut& cut, const Pool& pool, const Sink& sink,
                                          PhaseClock& clock) {
  count_listed(task, listed, cut);
  uint32_t counts = 0;
  pool.for_each(task.lane, [&](const Candidate& c) { counts += packed_count(c.key, cut); });
  counts = __reduce_add_sync(0xffffffffu, counts);
  if (task.lane == 0) task.shared->warp_value[0][task.warp] = counts;
  __syncthreads();
  clock.stamp();
  const uint32_t earlier = (1u << task.lane) - 1;
  const Place start(task, bracket, cut, 0);
  int next = start.next;
  uint32_t ties_left = start.ties_left;
  pool.for_each(task.lane, [&](const Candidate& c) {
    const uint32_t count = packed_count(c.key, cut);
    const uint32_t chosen = __ballot_sync(0xffffffffu, count == 1);
    const uint32_t ties = __ballot_sync(0xffffffffu, count > 1);
    const uint32_t tie = __popc(ties & earlier);
    if (count == 1 || (count > 1 && tie < ties_left)) {
      sink.put(next + __popc(chosen & earlier) + static_cast<int>(min(tie, ties_left)), c.position);
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
    pool.for_each(task.lane, [&](const Candidate& c) {
      if (c.key < base) return;
      if (c.key - base <= reach) {
        atomicAdd(&hist[(c.key - base) >> shift], 1u);
      } else {
        ++above;
      }
    });
    return above;
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    stream_topk(const __grid_constant__ TopkParams p, const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) unsigned char storage[];
  ptx::grid_take_over();
  const Job<T> job(p, shape, storage);
  const Task<T>& task = job.task;
  Shared& sm = *task.shared;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> shape.log2_ctas, job.writer);
  clock.stamp();
  if (job.finish_short(p)) return;

  const int span = warp_span(task.row.n, task.log2_ctas, sizeof(T));
  const int begin = min((task.rank * kWarps + task.warp) * span, task.row.n);
  const Stream<T> stream(
      task.row.data + begin, min(span, task.row.n - begin), task.lane,
      reinterpret_cast<unsigned char*>(task.list + shape.list_capacity) + task.warp * Stream<T>::kRingBytes);
  if (task.row.aligned) stream.request(0, 0);
  prepare_exchange(task);
  if (threadIdx.x == 0) sm.pool_used = 0;
  const bool by_hint = announce(task, is_usable(task, job.hint, shape.use_hint));
  const Sink sink = job.sink(p);
  const uint32_t hinted = gather_hint(task, job.hint);
  const auto samples = reinterpret_cast<uint32_t*>(task.masks);  // the pool's place, as yet empty
  // No warp's idea of the lower end is left out: what is below the bracket has to be read again.
  Bracket bracket = guess(task, job.hint, hinted, by_hint, 0, samples, [&] {
    // The sample first: behind all that the ring can hold it would wait for megabytes.
    if (!task.row.aligned) return;
#pragma unroll
    for (int step = 1; step < kRingDepth; ++step) {
      stream.request(step, step * Stream<T>::kWordBytes);
    }
  });
  const uint32_t source = bracket.source;
  clock.stamp();

  const Bracket everything = Bracket::everything();
  if (!task.row.aligned) {
    outlast_samples(task);
    fall_back<T>(p, shape, storage, Start{Attempt::kGuess, bracket, everything, source, 0});
    return;
  }
  Pool pool;
  pool.store = reinterpret_cast<Candidate*>(task.masks);
  pool.chunks = sm.pool_chunks[task.warp];
  pool.capacity = shape.pool_chunks;
  // A plateau may be most of the row. That is for `finish`, but only once all CTAs are known to agree: where
  // the hint is being written, they may have read different ones.
  pool.full = bracket.plateau() != kAbsentKey;
  if (pool.full) {
    ptx::wait_copies<0>();
  } else {
    sift(task, stream, key_to_float(bracket.lo), pool);
  }
  Verdict verdict = exchange(task, bracket, pool, 0, clock);
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
      verdict = exchange(task, bracket, pool, 1, clock);
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
      fall_back<T>(p, shape, storage, Start{attempt, bracket, everything, source, passes});
      return;
    }
  }
  clock.stamp();

  int snaps = 0;
  const Listed listed(task);
  const Cut cut = kth_key(task, bracket, listed, verdict, snaps);
  clock.stamp();
  job.count(p, hinted, cut.key);
  emit_pool(task, bracket, listed, cut, pool, sink, clock);
  clock.stamp();
  job.report(p, shape, passes, verdict.inside, snaps, source, guess_hit, 0);
}

}  // namespace gvr_topk::cluster
