// The row stays on chip: one cluster of 1 to 16 CTAs holds it in registers, 16 or 32 elements a thread, so
// global memory is read once and one exchange joins the CTAs.
//
// Only the way a guessed bracket takes is in this kernel's own code, which is kept short: at this size
// time is instructions issued and fetched. Where no bracket holds, the row is handed to `finish`, which
// settles it by radix rounds whatever it contains.
#pragma once

#include <algorithm>

#include "cluster/general.cuh"
#include "cluster/place.cuh"

namespace gvr_topk::cluster {

// The consecutive elements of one lane. They are fetched in coalesced order, and change hands in shared
// memory, so that index order is (CTA, warp, lane, place) and a rank takes a single scan over the lanes.
template <typename T, int kValues>
struct Part {
  static constexpr int kVecs = kValues / kPerVec<T>;
  // A vector of padding keeps 16-byte reads of neighbouring lanes in different banks.
  static constexpr int kLaneBytes = (kVecs + 1) * 16;

  int vecs;    // vectors a lane holds
  int begin;   // position of its first element
  int length;  // elements in the row from there on; may be none, or more than it holds
  unsigned char* stage;
  float value[kValues];

  // Starts the loads; `storage` holds kThreads * kLaneBytes.
  __device__ __forceinline__ Part(const Task<T>& task, unsigned char* storage) {
    const int lanes = kThreads << task.log2_ctas;
    const int log2_lanes = kLog2Threads + task.log2_ctas;
    vecs = ((task.row.n + lanes * kPerVec<T> - 1) >> log2_lanes) / kPerVec<T>;
    unsigned char* warp_stage = storage + task.warp * 32 * kLaneBytes;
    stage = warp_stage + task.lane * kLaneBytes;
    const int held = vecs * kPerVec<T>;
    const int first = (task.rank * kWarps + task.warp) * 32 * held;
    begin = first + task.lane * held;
    length = task.row.n - begin;
    // For divisions of small numbers by `vecs`, of 1 to 8.
    const int inverse = static_cast<int>(__fdividef(65536.0f, static_cast<float>(vecs))) + 1;
    const T* data = task.row.data + first;
    const int left = task.row.n - first;
    if (task.row.aligned) {
      const uint32_t target = ptx::shared_address(warp_stage);
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        const int c = 32 * j + task.lane;
        const int owner = c * inverse >> 16;
        const int offset = owner * kLaneBytes + (c - owner * vecs) * 16;
        const int there = left - c * kPerVec<T>;
        if (j < vecs && there >= kPerVec<T>) ptx::copy_async(target + offset, data + c * kPerVec<T>);
        if (j < vecs && there > 0 && there < kPerVec<T>) {
          // The end of the row: there may be nothing behind it to read.
#pragma unroll 1
          for (int e = 0; e < there; ++e)
            reinterpret_cast<T*>(warp_stage + offset)[e] = data[c * kPerVec<T> + e];
        }
      }
    } else {
#pragma unroll 1
      for (int i = task.lane; i < min(left, 32 * held); i += 32) {
        const int owner = (i / kPerVec<T> * inverse) >> 16;
        reinterpret_cast<T*>(warp_stage + owner * kLaneBytes)[i - owner * held] = data[i];
      }
    }
    ptx::commit_copies();
  }

  // Waits for the loads of the whole warp.
  __device__ __forceinline__ void take() {
    ptx::wait_copies<0>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
      const uint4 vec = reinterpret_cast<const uint4*>(stage)[j];
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) value[j * kPerVec<T> + e] = element<T>(vec, e);
    }
  }

  // Bits of the elements that mark(bits, value, bit) marks.
  template <typename Mark>
  __device__ __forceinline__ uint32_t bits(Mark mark) const {
    uint32_t found = 0;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (j >= vecs) break;
      uint32_t here = 0;  // on its own, for shorter chains
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        const int i = j * kPerVec<T> + e;
        mark(here, value[i], 1u << i);
      }
      found |= here;
    }
    const int there = max(length, 0);
    return there >= kValues ? found : found & ((1u << there) - 1);
  }

  __device__ __forceinline__ uint32_t not_below(float bound) const {
    return bits([&](uint32_t& found, float x, uint32_t bit) { ptx::mark_unless_less(found, x, bound, bit); });
  }

  __device__ __forceinline__ uint32_t equal(float level) const {
    return bits([&](uint32_t& found, float x, uint32_t bit) { found |= x == level ? bit : 0; });
  }

  // Key of one element, by a place known only at run time.
  __device__ __forceinline__ uint32_t key(int place) const {
    return order_key(to_float(reinterpret_cast<const T*>(stage)[place]));
  }
};

// The stage lies behind the list, where a fallback, which comes later, has other things.
template <typename T, int kValues>
inline size_t resident_bytes(const Shape& shape) {
  const size_t stage = size_t{kThreads} * Part<T, kValues>::kLaneBytes;
  return std::max(shared_bytes(shape), sizeof(Shared) + sizeof(uint32_t) * shape.list_capacity + stage);
}

// Counts what is above the bracket and lists what is inside, here and then in every CTA of the cluster.
template <typename T, int kValues>
__device__ __forceinline__ Verdict exchange(const Task<T>& task, const Bracket& bracket,
                                            const Part<T, kValues>& part, uint32_t parity,
                                            PhaseClock& clock) {
  Shared& sm = *task.shared;
  const float lo = bracket.low(), hi = bracket.high();
  // NaN fails both comparisons and so counts as above.
  const uint32_t not_below = part.not_below(lo);
  const uint32_t above =
      part.bits([&](uint32_t& bits, float x, uint32_t bit) { ptx::mark_unless_at_most(bits, x, hi, bit); });
  uint32_t inside = not_below & ~above;
  const uint32_t above_count = __reduce_add_sync(0xffffffffu, __popc(above));
  if (task.lane == 0) atomicAdd(&sm.above, above_count);
  const uint32_t plateau = bracket.plateau();
  if (plateau != kAbsentKey) {
    const float level = key_to_float(plateau);
    const uint32_t on_plateau = inside & part.equal(level);
    const uint32_t equal = __reduce_add_sync(0xffffffffu, __popc(on_plateau));
    if (task.lane == 0) atomicAdd(&sm.equal, equal);
    inside &= ~on_plateau;
  }
  if (inside != 0) {
    uint32_t slot = atomicAdd(&sm.listed, static_cast<uint32_t>(__popc(inside)));
    uint32_t* segment = task.list + task.rank * task.segment;
#pragma unroll 1
    for (; inside != 0; inside &= inside - 1) {
      if (slot < static_cast<uint32_t>(task.segment)) segment[slot] = part.key(__ffs(inside) - 1);
      ++slot;
    }
  }
  return exchange_lists(task, bracket, parity, clock);
}

// Writes this CTA's selected positions, in ascending order, at their final place. `report` runs before that,
// when all of the CTA have counted.
template <typename T, int kValues, typename Report>
__device__ __forceinline__ void emit_part(const Task<T>& task, const Bracket& bracket, const Listed& listed,
                                          const Cut& cut, const Part<T, kValues>& part, const Sink& sink,
                                          PhaseClock& clock, Report report) {
  count_listed(task, listed, cut);
  const float level = key_to_float(cut.key);
  uint32_t chosen = part.not_below(level);
  uint32_t ties = 0;
  if (!cut.takes_all()) ties = part.equal(level);
  const uint32_t mine = __popc(chosen & ~ties) | __popc(ties) << 16;
  const uint32_t upto = inclusive_scan(mine);
  if (task.lane == 31) task.shared->warp_value[0][task.warp] = upto;
  __syncthreads();
  clock.stamp();
  report();
  Place place(task, bracket, cut, upto - mine);
#pragma unroll 1
  for (; chosen != 0; chosen &= chosen - 1) {
    const int bit = __ffs(chosen) - 1;
    if (place.take(ties >> bit & 1)) sink.put(place.next++, part.begin + bit);
  }
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads, 1)
    resident_topk(const __grid_constant__ Shape shape, const __grid_constant__ TopkParams p) {
  extern __shared__ __align__(128) unsigned char storage[];
  ptx::grid_take_over();
  const Job<T> job(p, shape, storage);
  const Task<T>& task = job.task;
  PhaseClock clock(p.phase_clocks, blockIdx.x >> shape.log2_ctas, job.writer);
  clock.stamp();
  if (job.finish_short(p)) return;

  Part<T, kValues> part(task, reinterpret_cast<unsigned char*>(task.list + shape.list_capacity));
  prepare_exchange(task);
  const bool by_hint = announce(task, is_usable(task, job.hint, shape.use_hint));
  const Sink sink = job.sink(p);
  const uint32_t hinted = gather_hint(task, job.hint, by_hint);
  Bracket bracket = guess(task, job.hint, hinted, by_hint, true, [] {});
  const uint32_t source = bracket.source;
  part.take();
  clock.stamp();

  Verdict verdict;
  int passes = 0;
#pragma unroll 1
  while (true) {
    verdict = exchange(task, bracket, part, passes & 1, clock);
    ++passes;
    if (verdict.holds) break;
    const Bracket missed = bracket;
    const bool moved = passes == 1 && move_bracket(task, verdict, bracket);
    if (!moved) {
      // A crowd too large to list, but known to hold the k-th key, is all that needs to be divided.
      const Bracket range = verdict.contains ? missed : Bracket::everything();
      fall_back<T>(p, shape, storage, Start{Attempt::kRadix, range, range, source, passes});
      return;
    }
    start_again(task);
  }
  clock.stamp();

  int snaps = 0;
  const Listed listed(task);
  const Cut cut = kth_key(task, bracket, listed, verdict, snaps);
  clock.stamp();
  job.count(p, hinted, cut.key);
  emit_part(task, bracket, listed, cut, part, sink, clock,
            [&] { job.report(p, shape, passes, verdict.inside, snaps, source, passes == 1, 0); });
  clock.stamp();
}

}  // namespace gvr_topk::cluster
