// Radix rounds over the whole row: 10 bits of the key a round, a histogram per CTA, summed over the
// cluster. They find, for any content, a bracket that holds the k-th key and whose elements fit the
// list; a plateau ends as a bracket of one key. This is what missed guesses fall back to.
//
// The first round may start from a range: one that is known to hold the k-th key but holds too much else.
// Values that share their leading digits are then told apart at once, and what lies below costs a comparison
// only; a range that turns out wrong costs one round.
#pragma once

#include "cluster/state.cuh"
#include "common/histogram.cuh"

namespace gvr_topk::cluster {

// Adds one item per active lane. Scores share leading digits, so most of a warp aims at few bins:
// the two commonest are added once per warp, the rest one by one.
__device__ __forceinline__ void aggregate_add(uint32_t* hist, bool active, uint32_t bin) {
#pragma unroll
  for (int round = 0; round < 2; ++round) {
    const uint32_t active_lanes = __ballot_sync(0xffffffffu, active);
    if (active_lanes == 0) return;
    const int leader = __ffs(active_lanes) - 1;
    const uint32_t common = __shfl_sync(0xffffffffu, bin, leader);
    const uint32_t same = __ballot_sync(0xffffffffu, active && bin == common);
    if ((threadIdx.x & 31) == leader) atomicAdd(&hist[common], __popc(same));
    if (bin == common) active = false;
  }
  if (active) atomicAdd(&hist[bin], 1u);
}

// Sums every CTA's histogram, of 1024 bins and the items above them, into `keys` and `over_range`.
template <typename T>
__device__ __forceinline__ void sum_over_cluster(const Task<T>& task, const uint32_t* hist) {
  Shared& sm = *task.shared;
  constexpr int kGroups = Histogram::kBins / 4;
  sm.keys.clear_sums();
  __syncthreads();
  if (task.thread <= kGroups) {
    const uint32_t address = ptx::shared_address(hist + 4 * task.thread);
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (int c = 0; c < task.ctas; ++c) {
      const uint4 part = ptx::load_remote(ptx::map_to_rank(address, c));
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    if (task.thread < kGroups) {
      reinterpret_cast<uint4*>(sm.keys.fine)[task.thread] = sum;
      atomicAdd(&sm.keys.coarse[task.thread >> (Histogram::kLog2Group - 2)], sum.x + sum.y + sum.z + sum.w);
    } else {
      sm.over_range = sum.x;
    }
  }
  __syncthreads();
}

// Histogram of this CTA's keys in [base, base + reach]; returns how many of this thread's lie above.
template <typename T>
__device__ __forceinline__ uint32_t bin_words(const Task<T>& task, Word<T>& word, uint32_t* hist,
                                              uint32_t base, uint32_t reach, int shift) {
  uint32_t above = 0;
  task.for_each_word(word, [&](int, int begin) {
    uint32_t valid = valid_bits<T>(begin, task.end, task.lane);
#pragma unroll 1  // one vector's code, applied to each vector in turn as the word rotates
    for (int j = 0; j < Word<T>::kVecs; ++j) {
      const uint4 first = word.vec[0];
      if (begin + j * Word<T>::kGroup < task.end) {
#pragma unroll
        for (int e = 0; e < kPerVec<T>; ++e) {
          const uint32_t key = order_key(element<T>(first, e));
          const bool counts = (valid >> e & 1) != 0 && key >= base;
          const bool inside = counts && key - base <= reach;
          above += counts && !inside;
          aggregate_add(hist, inside, (key - base) >> shift);
        }
      }
      valid >>= kPerVec<T>;
#pragma unroll
      for (int i = 0; i < Word<T>::kVecs - 1; ++i) word.vec[i] = word.vec[i + 1];
      word.vec[Word<T>::kVecs - 1] = first;
    }
  });
  return above;
}

// Narrows `range` to a bracket; `rounds` counts the passes. bin_items(hist, base, reach, shift) adds this
// CTA's keys in [base, base + reach] to a histogram and returns how many of this thread's lie above. Every
// CTA of the cluster takes the same decisions, because they read the same sums.
template <typename T, typename BinItems>
__device__ __forceinline__ Bracket radix_bracket(const Task<T>& task, const Bracket& range, int& rounds,
                                                 BinItems bin_items) {
  Shared& sm = *task.shared;
  uint32_t base = range.lo;
  uint32_t reach = range.hi - range.lo;
  uint32_t rank = task.k;
  bool relative = false;  // `rank` counts from the top of the range, not of the row
  while (true) {
    const int shift = max(0, 32 - __clz(reach) - Histogram::kLog2Bins);
    uint32_t* hist = sm.hist[rounds & 1];
    for (int i = task.thread; i <= Histogram::kBins; i += kThreads) hist[i] = 0;
    __syncthreads();
    const uint32_t over = __reduce_add_sync(0xffffffffu, bin_items(hist, base, reach, shift));
    if (task.lane == 0) atomicAdd(&hist[Histogram::kBins], over);
    ++rounds;
    cluster_sync(task.ctas);
    sum_over_cluster(task, hist);
    // The sums are rewritten only after the next cluster barrier.
    const uint32_t above_range = relative ? 0 : sm.over_range;
    const BinHit hit = sm.keys.locate(rank - above_range, task.thread);
    if (above_range >= rank || hit.count == 0) {
      base = kMinKey;
      reach = kMaxKey - kMinKey;
      continue;
    }
    rank -= above_range + hit.above;
    relative = true;
    const uint32_t offset = hit.bin << shift;
    base += offset;
    reach = min(reach - offset, (1u << shift) - 1);
    if (reach == 0 || hit.count <= static_cast<uint32_t>(task.segment)) break;
  }
  return Bracket{base, base + reach, kGuessNone};
}

// The same over all elements of the row.
template <typename T>
__device__ __forceinline__ Bracket radix_bracket(const Task<T>& task, Word<T>& word, const Bracket& range,
                                                 int& rounds) {
  return radix_bracket(task, range, rounds, [&](uint32_t* hist, uint32_t base, uint32_t reach, int shift) {
    return bin_words(task, word, hist, base, reach, shift);
  });
}

}  // namespace gvr_topk::cluster
