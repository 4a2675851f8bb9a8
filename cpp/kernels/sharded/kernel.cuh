// Chooses the k largest scores of rows whose parts lie on several GPUs, each of which has selected the k best
// of its part.
//
// Grid: CTAs that take the rows in turn, as many on every rank. Grid dependencies let it start while the
// selection of the parts ends.
//
// The word of a score orders it among all scores of the row: its key, and below it a number that falls as
// positions ascend. No two words are equal, so the choice is the k largest ones, ties included, and the ranks
// look for the k-th. They exchange records (sharded/exchange.cuh): the first one says between which words it
// lies, each further one is a histogram of that interval, and the last one has the words of a bin of few. The
// first one is also a histogram of where the k-th word of this row lay in the last call, which mostly saves a
// record. All ranks compute the same from the same records, and so exchange equally often, whatever is in
// their memory.
#pragma once

#include "core/histogram.cuh"
#include "core/key.cuh"
#include "ptx/barrier.cuh"
#include "sharded/exchange.cuh"

namespace gvr_topk::sharded {

constexpr int kLog2Bins = 9;
constexpr int kBins = 1 << kLog2Bins;
static_assert(kBins == kThreads && kBins == 2 * kPeerWords, "two bins to a word, of which no rank has 2^16");
constexpr int kListed = kPeerWords / 2;
constexpr int kEach = kPeerMaxK / kThreads;  // items of a thread
constexpr int kPositionBits = 31;
constexpr int kWordBits = 32 + kPositionBits;
constexpr uint64_t kLastPosition = (uint64_t{1} << kPositionBits) - 2;
constexpr uint64_t kLeastWord = 1;

struct Smem {
  Exchange::Smem exchange;
  uint32_t bins[kBins];
  uint32_t warp_sums[kWarps];
  alignas(16) BinHit hit;
  uint64_t least[kWarps], most[kWarps];
  uint64_t list[kListed];
  uint32_t listed;  // words in `list` or in a record
  uint64_t kth;
};

GVR_DEVICE float score_at(const ShardedParams& p, int64_t row, int32_t position) {
  const int64_t at = row * p.logits_stride + position;
  if (p.dtype == Dtype::kFloat32) return static_cast<const float*>(p.logits)[at];
  if (p.dtype == Dtype::kBfloat16) return to_float(static_cast<const __nv_bfloat16*>(p.logits)[at]);
  return to_float(static_cast<const __half*>(p.logits)[at]);
}

// The place of a position of this rank's part in a row whose positions go to the ranks in turn.
GVR_DEVICE int64_t interleaved(const ShardedParams& p, int32_t position) {
  const int64_t turn = position / p.interleave;
  return position + (turn * (p.world - 1) + p.rank) * p.interleave;
}

// The k best items of this rank's part, consecutive ones in a thread.
struct Items {
  int32_t position[kEach];
  uint64_t word[kEach];  // 0: none

  GVR_DEVICE Items(const ShardedParams& p, int64_t row, int thread) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = kEach * thread + i;
      position[i] = at < p.k ? p.best[row * p.best_stride + at] : -1;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      word[i] = 0;
      if (position[i] < 0 || position[i] >= p.width) continue;
      const int64_t order = p.interleave > 0 ? interleaved(p, position[i]) : position[i] + p.rank * kMaxWidth;
      const uint64_t key = order_key(score_at(p, row, position[i]));
      word[i] = key << kPositionBits | (kLastPosition - static_cast<uint64_t>(order));
    }
  }

  template <typename Use>
  GVR_DEVICE void each_within(uint64_t low, uint64_t high, Use use) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (low <= word[i] && word[i] <= high) use(word[i]);
    }
  }
};

// Words between which the k-th lies, both included.
struct WordRange {
  uint64_t low, high;
  uint32_t chosen;           // of those up to `high`
  uint32_t count = 1 << 30;  // how many there are, at most

  // The shift by which words of the interval have their bins.
  GVR_DEVICE int shift(int log2_bins) const {
    return max(0, 64 - __clzll(static_cast<int64_t>(high - low)) - log2_bins);
  }
  GVR_DEVICE void narrow(const BinHit& hit, int shift) {
    low += uint64_t{hit.bin} << shift;
    high = min(high, low + (uint64_t{1} << shift) - 1);
    chosen -= hit.above;
    count = hit.count;
  }
};

// The chooser of one row.
struct Chooser {
  const ShardedParams& p;
  Smem& smem;
  Exchange& exchange;
  int64_t row;
  int thread, lane, warp;
  uint32_t zero;

  GVR_DEVICE void put(int at, uint64_t value) const {
    smem.exchange.sent[at] = static_cast<uint32_t>(value);
    smem.exchange.sent[at + 1] = static_cast<uint32_t>(value >> 32);
  }
  GVR_DEVICE uint64_t got(int rank, int at) const {
    const uint32_t* const words = &smem.exchange.received[rank][at];
    return words[0] | uint64_t{words[1]} << 32;
  }

  // What a first record holds, by words of 4 bytes: a header, the length of the part, how many words there
  // are and how many above the guess, the least and the largest word, the guess, and its bins.
  static constexpr int kLength = 2 * kHeaderWords, kCount = kLength + 1, kAbove = kLength + 2,
                       kLeast = kLength + 4;
  static constexpr int kMost = kLeast + 2, kGuess = kMost + 2, kGuessBins = 32;
  static constexpr int kLog2GuessBins = kLog2Bins - 1;
  static_assert(kGuess + 4 <= kGuessBins && kGuessBins + (1 << kLog2GuessBins) / 2 <= kPeerWords);

  // Counts the words of an interval, by two bins to a word of the record from `first` on.
  GVR_DEVICE void count_own(const Items& items, const WordRange& in, int shift, int first, int words) const {
    smem.bins[thread] = 0;
    __syncthreads();
    items.each_within(in.low, in.high,
                      [&](uint64_t word) { atomicAdd(&smem.bins[(word - in.low) >> shift], 1); });
    __syncthreads();
    if (thread < words) {
      smem.exchange.sent[first + thread] = smem.bins[2 * thread] | smem.bins[2 * thread + 1] << 16;
    }
  }

  // Adds up the bins of all ranks, which stand from `first` on, and finds the one of the last chosen word.
  GVR_DEVICE BinHit find_bin(int first, int words, uint32_t chosen) const {
    uint32_t sum = 0;
    for (int rank = 0; rank < p.world && thread < 2 * words; ++rank) {
      sum += smem.exchange.received[rank][first + thread / 2] >> (16 * (thread & 1)) & 0xffff;
    }
    smem.bins[thread] = sum;
    if (thread == 0) smem.hit.count = 0;
    ptx::reconverge(zero);
    __syncthreads();
    return locate_in_block<1>(smem.bins, smem.warp_sums, smem.hit, chosen, warp, lane, [] {});
  }

  // Puts a first record together, but for the bins.
  GVR_DEVICE void put_first(const Items& items, const WordRange& guess) const {
    const int32_t length = p.lengths[row];
    const int64_t step = p.step != nullptr ? *p.step : p.header[kHeaderWords - 1];
    uint64_t least = ~uint64_t{0}, most = 0;
    uint32_t counts = 0;  // above the guess in the upper half
    items.each_within(kLeastWord, ~uint64_t{0}, [&](uint64_t word) {
      least = min(least, word);
      most = max(most, word);
      counts += word > guess.high ? 0x10001 : 1;
    });
    reduce(least, most, counts);
    if (lane == 0) {
      smem.least[warp] = least;
      smem.most[warp] = most;
      smem.warp_sums[warp] = counts;
    }
    __syncthreads();
    if (warp > 0) return;
    least = smem.least[lane % kWarps];
    most = smem.most[lane % kWarps];
    counts = lane < kWarps ? smem.warp_sums[lane] : 0;
    reduce(least, most, counts);
    if (lane > 0) return;
    for (int i = 0; i < kHeaderWords; ++i) put(2 * i, i == kHeaderWords - 1 ? step : p.header[i]);
    smem.exchange.sent[kLength] = min(max(length, 0), p.width);
    smem.exchange.sent[kCount] = counts & 0xffff;
    smem.exchange.sent[kAbove] = counts >> 16;
    put(kLeast, least);
    put(kMost, most);
    put(kGuess, guess.low);
    put(kGuess + 2, guess.high);
  }

  GVR_DEVICE void reduce(uint64_t& least, uint64_t& most, uint32_t& counts) const {
    ptx::reconverge(zero);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      least = min(least, __shfl_xor_sync(0xffffffffu, least, d));
      most = max(most, __shfl_xor_sync(0xffffffffu, most, d));
    }
    counts = __reduce_add_sync(0xffffffffu, counts);
  }

  // Exchanges first records. Returns whether all ranks mean the same call; the host is told if not.
  GVR_DEVICE bool introduce(const Items& items, const WordRange& guess) const {
    count_own(items, guess, guess.shift(kLog2GuessBins), kGuessBins, 1 << (kLog2GuessBins - 1));
    put_first(items, guess);
    if (!exchange.run<kPeerWords>(thread)) return false;
    const int rank = thread / kHeaderWords, at = 2 * (thread % kHeaderWords);
    const bool differs = rank < p.world && got(rank, at) != got(0, at);
    if (!__syncthreads_or(differs)) return true;
    if (rank < p.world) p.told[thread] = static_cast<int64_t>(got(rank, at));
    return false;
  }

  // The interval that follows from the first records: a rank that has k words has none below the k-th.
  GVR_DEVICE WordRange first_interval() const {
    uint64_t full = 0, least = ~uint64_t{0}, most = 0;
    for (int rank = 0; rank < p.world; ++rank) {
      if (smem.exchange.received[rank][kCount] >= p.k) full = max(full, got(rank, kLeast));
      least = min(least, got(rank, kLeast));
      most = max(most, got(rank, kMost));
    }
    return {full != 0 ? full : least, most, static_cast<uint32_t>(p.k)};
  }

  // The bin of the guess in which the k-th word lies; of no word if it lies elsewhere, or ranks guess unlike.
  GVR_DEVICE WordRange guessed_interval() const {
    uint32_t above = 0;
    WordRange guess{got(0, kGuess), got(0, kGuess + 2), 0, 0};
    bool is_common = guess.low > 0;
    for (int rank = 0; rank < p.world; ++rank) {
      above += smem.exchange.received[rank][kAbove];
      is_common &= got(rank, kGuess) == guess.low && got(rank, kGuess + 2) == guess.high;
    }
    guess.chosen = p.k - above;
    if (!is_common || above >= p.k) return guess;
    guess.narrow(find_bin(kGuessBins, 1 << (kLog2GuessBins - 1), guess.chosen), guess.shift(kLog2GuessBins));
    return guess;
  }

  // Sum of the lengths of the parts ahead.
  GVR_DEVICE int32_t first_position() const {
    int32_t sum = 0;
    for (int rank = 0; rank < p.rank; ++rank)
      sum += static_cast<int32_t>(smem.exchange.received[rank][kLength]);
    return sum;
  }

  // Exchanges the words of an interval that has no more than kListed, and finds the k-th.
  GVR_DEVICE bool list_words(const Items& items, const WordRange& in) const {
    if (thread < kPeerWords) smem.exchange.sent[thread] = 0;
    if (thread == 0) {
      smem.listed = 0;
      smem.kth = in.low;
    }
    __syncthreads();
    items.each_within(in.low, in.high, [&](uint64_t word) {
      const uint32_t at = atomicAdd(&smem.listed, 1);
      if (at < kListed) put(2 * static_cast<int>(at), word);
    });
    if (!exchange.run<kPeerWords>(thread)) return false;
    if (thread == 0) smem.listed = 0;
    __syncthreads();
    for (int i = thread; i < p.world * kListed; i += kThreads) {
      const uint64_t word = got(i / kListed, 2 * (i % kListed));
      if (word == 0) continue;
      const uint32_t at = atomicAdd(&smem.listed, 1);
      if (at < kListed) smem.list[at] = word;
    }
    __syncthreads();
    const int listed = min(smem.listed, kListed);
    if (thread < listed) {
      uint32_t greater = 0;
      for (int i = 0; i < listed; ++i) greater += smem.list[i] > smem.list[thread];
      if (greater == in.chosen - 1) smem.kth = smem.list[thread];
    }
    __syncthreads();
    return true;
  }

  // Finds the k-th largest word of all ranks; kLeastWord if there are fewer. Returns whether the ranks agree.
  GVR_DEVICE bool find(const Items& items, WordRange in, uint64_t& kth) const {
    // Each round leaves at most the bits of a bin, so this is more often than any row needs.
    for (int bits = kWordBits + kLog2Bins; bits > 0; bits -= kLog2Bins) {
      kth = kLeastWord;
      if (in.high < in.low || in.count == 0) return true;
      kth = in.low;
      if (in.high == in.low) return true;
      if (in.count <= kListed) {
        if (!list_words(items, in)) return false;
        kth = smem.kth;
        return true;
      }
      const int shift = in.shift(kLog2Bins);
      count_own(items, in, shift, 0, kPeerWords);
      if (!exchange.run<kPeerWords>(thread)) return false;
      in.narrow(find_bin(0, kPeerWords, in.chosen), shift);
    }
    return true;
  }

  // Writes the items of this rank from the k-th word on.
  GVR_DEVICE void write(const Items& items, uint64_t kth, int32_t first) const {
    uint32_t chosen = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) chosen += items.word[i] >= kth;
    ptx::reconverge(zero);
    const uint32_t upto = ptx::inclusive_scan(chosen);
    if (lane == 31) smem.warp_sums[warp] = upto;
    __syncthreads();
    const uint32_t sum = lane < kWarps ? smem.warp_sums[lane] : 0;
    uint32_t at = __reduce_add_sync(0xffffffffu, lane < warp ? sum : 0) + upto - chosen;
    const uint32_t count = min(__reduce_add_sync(0xffffffffu, sum), p.k);
    int32_t* const out = p.out + row * p.out_stride;
    int32_t* const local = p.local + row * p.local_stride;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (items.word[i] < kth || at >= p.k) continue;
      local[at] = items.position[i];
      const int64_t place = p.interleave > 0 ? interleaved(p, items.position[i]) : items.position[i] + first;
      out[at++] = static_cast<int32_t>(place);
    }
    for (int i = static_cast<int>(count) + thread; i < p.k; i += kThreads) out[i] = local[i] = -1;
    if (thread == 0) p.counts[row] = static_cast<int32_t>(count);
  }

  // Returns whether further rows can be chosen from: ranks that mean different calls exchange nothing more.
  GVR_DEVICE bool run(bool can_exchange) const {
    const Items items(p, row, thread);
    uint64_t* const last = row < kPeerGuesses ? p.guesses + 2 * row : nullptr;
    const WordRange guess{last != nullptr ? last[0] : 0, last != nullptr ? last[1] : 0, 0};
    uint64_t kth = ~uint64_t{0};  // above all: nothing is chosen of a row that the ranks do not agree on
    int32_t first = 0;
    can_exchange = can_exchange && introduce(items, guess);
    if (can_exchange) {
      first = first_position();
      const WordRange all = first_interval();
      const WordRange guessed = guessed_interval();
      uint64_t found = kth;
      can_exchange = find(items, guessed.count > 0 ? guessed : all, found);
      if (can_exchange) kth = found;
      if (last != nullptr && thread < 2) last[thread] = thread == 0 ? all.low : all.high;
    }
    write(items, kth, first);
    __syncthreads();
    return can_exchange;
  }
};

static __global__ void __launch_bounds__(kThreads, 1) choose(const __grid_constant__ ShardedParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
  ptx::grid_take_over();
  Exchange exchange(p, smem.exchange, static_cast<int>(blockIdx.x));
  bool can_exchange = true;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const Chooser chooser{p, smem, exchange, row, thread, thread & 31, thread >> 5, ptx::unknown_zero()};
    can_exchange = chooser.run(can_exchange);
  }
  if (thread == 0) p.progress[blockIdx.x] = exchange.number;
}

}  // namespace gvr_topk::sharded
