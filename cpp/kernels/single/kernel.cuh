// Short rows: one CTA holds the row in registers, as keys, and needs no guess and no other CTA.
//
// A radix select of 11 bits a round, out of the registers. Additions of one in shared memory cost next to
// nothing even when they all meet in one bin, so that every element is counted, those outside the range in a
// bin of their own, and nothing branches. Two rounds usually leave the k-th key alone. The same code settles
// plateaus, infinities and NaN: time hardly depends on what the row holds.
#pragma once

#include "common/histogram.cuh"
#include "single/held.cuh"

namespace gvr_topk::single {

constexpr int kLog2Bins = 11;
constexpr int kBins = 1 << kLog2Bins;
static_assert(kBins == 4 * kThreads, "four bins are summed up by each thread");

struct alignas(128) Bins {
  uint32_t set[2][kBins + 4];  // in turn; one bin more counts what is outside the range
  uint32_t group[kWarps];
  BinHit hit;
};

// The k-th key lies in [base, base + reach], as the `rank`-th largest of `count` elements.
struct Range {
  uint32_t base, reach;
  uint32_t rank, count;

  // All keys in it are equal, or all are wanted: then its lower edge serves as the k-th key.
  __device__ __forceinline__ bool settled() const { return reach == 0 || rank == count; }
};

__device__ __forceinline__ uint32_t sum_of(const uint4& four) { return four.x + four.y + four.z + four.w; }

// Bin of the rank-th largest of what all warps have counted in `set`, behind a block barrier: the thread that
// finds it tells the others. `other` is not looked at any more, and cleared if `clear`.
template <typename T>
__device__ __forceinline__ BinHit locate(const Task<T>& task, Bins& bins, const uint32_t* set,
                                         uint32_t* other, bool clear, uint32_t rank) {
  const uint4 four = reinterpret_cast<const uint4*>(set)[task.thread];
  const uint32_t sum = sum_of(four);
  const uint32_t upto = suffix_sum(sum);
  if (task.lane == 0) bins.group[task.warp] = upto;
  if (clear) reinterpret_cast<uint4*>(other)[task.thread] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const bool higher = task.warp < task.lane && task.lane < kWarps;
  uint32_t above = __reduce_add_sync(0xffffffffu, higher ? bins.group[task.lane] : 0) + upto - sum;
  if (above < rank && rank <= above + sum) {
    uint32_t bin = 4 * task.thread + 3, count = four.w;
    if (rank > above + count) above += count, --bin, count = four.z;
    if (rank > above + count) above += count, --bin, count = four.y;
    if (rank > above + count) above += count, --bin, count = four.x;
    bins.hit = BinHit{bin, above, count};
  }
  __syncthreads();
  return bins.hit;
}

// Of a few elements, by comparing them with each other.
template <typename T, int kValues>
__device__ __forceinline__ Range compare(const Task<T>& task, const Held<T, kValues>& held, Bins& bins,
                                         const Range& range) {
  Shared& sm = *task.shared;
  auto inside = held.bits([&](float& marks, uint32_t x, float bit) {
    ptx::mark_if_at_most(marks, x - range.base, range.reach, bit);
  });
#pragma unroll 1  // few lanes hold any
  for (; inside != 0; inside &= inside - 1) {
    sm.small[atomicAdd(&sm.small_count, 1u)] = held.key_at(first_bit(inside));
  }
  __syncthreads();
  // Every warp looks how many are greater than each of its two.
  const uint32_t mine = task.lane < static_cast<int>(range.count) ? sm.small[task.lane] : kAbsentKey;
  static_assert(kRankDirectly == 2 * kWarps);
  const uint2 two = reinterpret_cast<const uint2*>(sm.small)[task.warp];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t key = i == 0 ? two.x : two.y;
    const uint32_t greater = __popc(__ballot_sync(0xffffffffu, mine > key));
    const uint32_t equal = __popc(__ballot_sync(0xffffffffu, mine == key));
    const bool there = 2 * task.warp + i < static_cast<int>(range.count);
    if (there && greater < range.rank && range.rank <= greater + equal)
      bins.hit = BinHit{key, greater, equal};
  }
  __syncthreads();
  return Range{bins.hit.bin, 0, range.rank - bins.hit.above, bins.hit.count};
}

// Rounds until one key, or all of a range, is what is wanted.
template <typename T, int kValues>
__device__ __forceinline__ Range narrow(const Task<T>& task, const Held<T, kValues>& held, Bins& bins,
                                        int& rounds) {
  constexpr int kKeyBits = 32 - kIdleBits<T>;
  Range range{0, kMaxKey >> kIdleBits<T>, static_cast<uint32_t>(task.k), kMaxKey};
  int shift = kKeyBits - kLog2Bins;
  // Bins of the range, keys being shifted before they are subtracted: it starts at a multiple of its length.
  // All that is outside goes to the bin behind the last.
  const auto count = [&](uint32_t* set, uint32_t first, uint32_t outside) {
    held.for_each_place([&](int i) { atomicAdd(&set[min((held.key[i] >> shift) - first, outside)], 1u); });
    __syncthreads();
  };
  // The longest rows count inside the loop, or their registers are spilled.
  constexpr bool kBeforeLoop = kValues <= kWideValuesPerThread;
  if constexpr (kBeforeLoop) count(bins.set[0], 0, kBins);
#pragma unroll 1
  while (true) {
    if (!kBeforeLoop && rounds == 0) count(bins.set[0], 0, kBins);
    uint32_t* const other = bins.set[~rounds & 1];
    const BinHit hit = locate(task, bins, bins.set[rounds & 1], other, rounds > 0, range.rank);
    ++rounds;
    const uint32_t offset = hit.bin << shift;
    range.base += offset;
    range.reach = min(range.reach - offset, (1u << shift) - 1);
    range.rank -= hit.above;
    range.count = hit.count;
    if (range.settled() || range.count <= kRankDirectly) break;
    shift = max(0, 32 - kLog2Bins - __clz(range.reach));
    const uint32_t outside = (range.reach >> shift) + 1;
    count(other, range.base >> shift, outside);
    if (outside < kBins) range.rank += other[outside];
  }
  return range.settled() ? range : compare(task, held, bins, range);
}

// Leaves of the ties, `chosen` with all others, the first in index order that the quota allows; `before`
// becomes the number selected in earlier warps.
template <typename T, int kValues, typename Bits>
__device__ __forceinline__ Bits limit_ties(const Task<T>& task, const Held<T, kValues>& held,
                                           const Range& range, Bits chosen, uint32_t& before) {
  Shared& sm = *task.shared;
  const Bits ties = held.bits(
      [&](float& marks, uint32_t x, float bit) { ptx::mark_if_at_most(marks, x - range.base, 0, bit); });
  const uint32_t all = __reduce_add_sync(0xffffffffu, count_bits(chosen));
  const uint32_t tied = __reduce_add_sync(0xffffffffu, count_bits(ties));
  if (task.lane == 0) sm.warp_value[1][task.warp] = (all - tied) | tied << 16;
  __syncthreads();
  const uint32_t packed = earlier_warps(task, 1);
  const uint32_t ties_before = min(packed >> 16, range.rank);
  before = (packed & 0xffffu) + ties_before;
  const uint32_t left = range.rank - ties_before;
  uint32_t passed = 0;
#pragma unroll
  for (int w = 0; w < Held<T, kValues>::kWords; ++w) {
    passed +=
        for_each_in_order<T>(held.word(ties, w), kVecsOfWord<T>, task.lane, [&](int bit, uint32_t rank) {
          if (passed + rank >= left) chosen &= ~(Bits{1} << (kValuesPerThread * w + bit));
        });
  }
  return chosen;
}

struct alignas(128) Storage {
  Shared shared;
  Bins bins;
  // [k] selected positions, in ascending order; those of a short row fit 16 bits.
  alignas(8) uint16_t staged[1];
};

inline size_t single_bytes(int k) { return sizeof(Storage) + sizeof(uint16_t) * k; }

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads, kValues < kValuesPerThread ? 2 : 1)
    single_topk(const __grid_constant__ Shape shape, const __grid_constant__ TopkParams p, const Path path) {
  extern __shared__ __align__(128) unsigned char storage[];
  Storage& own = *reinterpret_cast<Storage*>(storage);
  ptx::grid_take_over();
  Held<T, kValues> held;
  if constexpr (held.kAhead) held.load(row_buffer<T>(p, shape.has(Shape::kAligned), blockIdx.x));
  // What lanes add to one address the compiler would first add up over the warp. Few do here, and that takes
  // longer.
  Job<T> job(p, shape, Room{}, storage + ptx::unknown_zero());
  const Task<T>& task = job.task;
  Shared& sm = *task.shared;
  PhaseClock clock(p.phase_clocks, blockIdx.x, job.writer);
  clock.stamp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reinterpret_cast<uint4*>(own.bins.set[i])[task.thread] = make_uint4(0, 0, 0, 0);
  }
  const Sink sink = job.sink(p, shape);  // here, where there is time for parameters to come
  job.measure(p, shape);
  if (job.finish_short(p, shape)) return;
  if constexpr (!held.kAhead) held.load(task.row);

  if (task.thread == 0) {
    sm.hinted = sm.at_or_above = sm.small_count = 0;
    // Unknown to the next step: in rows this short nobody looks at the hint.
    if (p.guess_state != nullptr && sink.prior != nullptr) p.guess_state[job.slot(p, shape)] = kNoFeedback;
  }
  __syncthreads();
  held.take(task.row.n, task.lane);
  clock.stamp();
  int rounds = 0;
  const Range range = narrow(task, held, own.bins, rounds);
  clock.stamp();

  auto chosen = held.bits(
      [&](float& marks, uint32_t x, float bit) { ptx::mark_if_at_least(marks, x, range.base, bit); });
  uint32_t before = 0;
  if (range.rank == range.count) {
    const uint32_t here = __reduce_add_sync(0xffffffffu, count_bits(chosen));
    if (task.lane == 0) sm.warp_value[0][task.warp] = here;
    __syncthreads();
    before = earlier_warps(task, 0);
  } else {
    chosen = limit_ties(task, held, range, chosen, before);
  }
  audit(p, shape, job, range.base << kIdleBits<T>);
  clock.stamp();
  stage(task, held, chosen, before, own.staged);
  __syncthreads();
  write_out(task, own.staged, sink);
  clock.stamp();
  if (task.thread != 0 || !shape.has(Shape::kAudited)) return;
  write_stats(stats_of(p, shape, job.row), path, 1, static_cast<int>(range.count), rounds,
              job.slot(p, shape) >= 0 ? static_cast<int>(sm.at_or_above) : -1, kGuessNone, false, rounds);
}

}  // namespace gvr_topk::single
