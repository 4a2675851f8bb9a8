// Radix rounds: 9 bits of the key a round, a histogram of every CTA, summed over the cluster. They find, for
// any content, a bracket that holds the k-th key and whose elements fit the lists; a plateau ends as a
// bracket of one key. This is what missed guesses fall back to.
//
// A histogram travels as a list of keys does, in one exchange, and every CTA sums up all of them; all then
// take the same decisions, because they have the same counts.
//
// The rounds may start from a range that is known to hold the k-th key. Values that share their leading
// digits are then told apart at once.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/state.cuh"
#include "common/histogram.cuh"

namespace gvr_topk::cluster {

// Where the counts of one thread's items go, and how many of them lie above the range.
struct RadixBins {
  uint32_t* hist;
  uint32_t base, reach;
  int shift;
  uint32_t above = 0;

  __device__ __forceinline__ void add(uint32_t key) {
    const uint32_t distance = key - base;
    const bool inside = key >= base && distance <= reach;
    above += key >= base && !inside;
    if (inside) atomicAdd(&hist[distance >> shift], 1u);
  }
};

// Sums every CTA's histogram into `keys`, and `over` into `over_range`. The candidate lists carry them.
template <typename T>
__device__ __forceinline__ void sum_over_cluster(const Task<T>& task, uint32_t over, uint32_t parity) {
  static_assert(kRadixBins == kThreads && Histogram::kBins == 2 * kRadixBins);
  Shared& sm = *task.shared;
  const int bin = task.thread;
  sm.keys.template clear<kThreads>();
  if (bin == 0) sm.counts = Counts{0, kRadixBins, 0};
  __syncthreads();  // all of the block have counted
  task.list.put(bin, sm.hist[bin]);
  over = __reduce_add_sync(0xffffffffu, over);
  if (task.lane == 0) atomicAdd(&sm.counts.above, over);
  __syncthreads();
  send_and_wait(task, Bracket::everything(), parity, [] {});
  uint32_t sum = 0;
#pragma unroll 4
  for (int c = 0; c < task.ctas; ++c) sum += task.list.of(c)[bin];
  sm.keys.fine[bin] = sum;
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (task.lane == 0) atomicAdd(&sm.keys.coarse[bin >> Histogram::kLog2Group], sum);
  if (task.warp == 0) {
    const uint32_t above = task.lane < task.ctas ? sm.header[task.lane].counts.above : 0;
    const uint32_t all = __reduce_add_sync(0xffffffffu, above);
    if (task.lane == 0) sm.over_range = all;
  }
  __syncthreads();
}

// Narrows a range that holds the k-th key to a bracket. `rounds` counts the passes, and `exchanges` all
// exchanges of the launch, for their parity. add_keys(bins) counts this thread's keys. The lists are free
// when it is called, and when it returns; the counts are not reset.
//
// Rounds are over finite keys. What is neither among them nor above them is -inf, and of those above them
// there are two: so a masked row takes one round, and one of infinities two. It ends whatever it reads: a row
// that is overwritten meanwhile may have no k-th key where one was counted.
template <typename T, typename AddKeys>
__device__ __forceinline__ Bracket radix_bracket(const Task<T>& task, const Bracket& range,
                                                 uint32_t& exchanges, int& rounds, AddKeys add_keys) {
  constexpr int kMostRounds = 2 + (32 + kLog2RadixBins - 1) / kLog2RadixBins;
  Shared& sm = *task.shared;
  if (range.hi <= kNegInfKey) return Bracket::only(kNegInfKey);
  if (range.lo > kPosInfKey) return Bracket::only(kMaxKey);
  uint32_t base = max(range.lo, kLeastFiniteKey);
  uint32_t reach = max(min(range.hi, kMostFiniteKey), base) - base;
  if (base > kMostFiniteKey) base = kPosInfKey, reach = kMaxKey - kPosInfKey;
  uint32_t rank = task.k;
  bool relative = false;  // `rank` counts from the top of the range, not of the row
#pragma unroll 1
  for (int round = 0; round < kMostRounds; ++round) {
    const int shift = max(0, 32 - __clz(reach) - kLog2RadixBins);
    sm.hist[task.thread] = 0;
    __syncthreads();
    RadixBins bins{sm.hist, base, reach, shift};
    add_keys(bins);
    ++rounds;
    sum_over_cluster(task, bins.above, exchanges++ & 1);
    const uint32_t above_range = relative ? 0 : sm.over_range;
    const BinHit hit = sm.keys.locate(rank - above_range, task.thread);
    const bool is_above = above_range >= rank, found = !is_above && hit.count != 0;
    bool fits = true;
    if (found && task.lane < task.ctas) {
      fits = task.list.of(task.lane)[hit.bin] <= static_cast<uint32_t>(task.list.segment());
    }
    fits = __all_sync(0xffffffffu, fits);
    cluster_sync(task.ctas);  // all have read the lists and the sums
    if (is_above && base != kPosInfKey) {
      base = kPosInfKey;
      reach = kMaxKey - kPosInfKey;
      continue;
    }
    if (!found) return Bracket::only(kNegInfKey);
    if (base == kPosInfKey) return Bracket::only(hit.bin == 0 ? kPosInfKey : kMaxKey);
    rank -= above_range + hit.above;
    relative = true;
    const uint32_t offset = hit.bin << shift;
    base += offset;
    reach = min(reach - offset, (1u << shift) - 1);
    if (reach == 0 || fits) break;
  }
  return Bracket{base, base + reach, kGuessNone};
}

// The same over all elements of the row.
template <typename T>
__device__ __forceinline__ Bracket radix_bracket(const Task<T>& task, Word<T>& word, const Bracket& range,
                                                 uint32_t& exchanges, int& rounds) {
  return radix_bracket(task, range, exchanges, rounds, [&](RadixBins& bins) {
    task.for_each_word(word, [&](int, int begin) {
      uint32_t valid = valid_bits<T>(begin, task.end, task.lane);
#pragma unroll 1  // one vector's code, applied to each vector in turn as the word rotates
      for (int j = 0; j < Word<T>::kVecs; ++j) {
        const uint4 first = word.vec[0];
#pragma unroll
        for (int e = 0; e < kPerVec<T>; ++e) {
          if ((valid >> e & 1) != 0) bins.add(order_key(element<T>(first, e)));
        }
        valid >>= kPerVec<T>;
#pragma unroll
        for (int i = 0; i < Word<T>::kVecs - 1; ++i) word.vec[i] = word.vec[i + 1];
        word.vec[Word<T>::kVecs - 1] = first;
      }
    });
  });
}

}  // namespace gvr_topk::cluster
