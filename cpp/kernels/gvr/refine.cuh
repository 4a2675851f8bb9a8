// Phases 3 and 4: collect the candidates without ballots or atomics, then snap to the exact k-th value
// (paper, sections 4.2.3 and 4.2.4).
#pragma once

#include "gvr/search.cuh"

namespace gvr_topk::gvr {

// Each thread knows from the count cache how many candidates it has, hence where they go.
template <typename T>
__device__ __forceinline__ void collect(Shared& sm, const cluster::Task<T>& task, Word<T>& word,
                                        const Found& found) {
  uint32_t place = exclusive_sum(sm, found.thread_count);
  const bool finite = negative_infinity() < found.threshold;
  task.for_each_word(word, [&](int, int begin) {
    uint32_t bits = match_word(word, begin, task.end, [&](float x) { return !(x < found.threshold); });
    if (!finite) bits &= valid_bits<T>(begin, task.end, task.lane);
    for (; bits != 0; bits &= bits - 1) {
      sm.position[place++] = bit_position<T>(begin, __ffs(bits) - 1, task.lane);
    }
  });
  __syncthreads();
  // Their keys come from cache: a register cannot be indexed by a bit's place.
  for (int i = threadIdx.x; i < found.count; i += kThreads) sm.key[i] = task.row.key(sm.position[i]);
  __syncthreads();
}

// Calls visit(key) for this thread's candidates.
template <typename Visit>
__device__ __forceinline__ void for_each_candidate(const Shared& sm, int count, Visit visit) {
  for (int i = threadIdx.x; i < count; i += kThreads) visit(sm.key[i]);
}

struct Snap {
  uint32_t key;  // the exact k-th key
  int scans;
};

// Key of the lower edge of the bin that holds the k-th candidate: bins even in value, and a bin with
// too many members (an outlier stretched the range) divided again, even in key.
__device__ __forceinline__ uint32_t histogram_start(Shared& sm, int count, int k, int& scans) {
  uint32_t low_key = 0xffffffffu, high_key = 0;
  for_each_candidate(sm, count, [&](uint32_t x) {
    if (kNegInfKey < x && x < kPosInfKey) {
      low_key = min(low_key, x);
      high_key = max(high_key, x);
    }
  });
  low_key = block_reduce<Reduce::kMin>(sm, low_key);
  high_key = block_reduce<Reduce::kMax>(sm, high_key);
  const float low = high_key != 0 ? key_to_float(low_key) : 0.0f;
  const float high = high_key != 0 ? key_to_float(high_key) : 0.0f;
  float scale = __fdiv_rn(static_cast<float>(kBins), __fsub_rn(high, low));
  const bool usable = high_key != 0 && is_finite(scale) && scale > 0.0f;
  const auto bin_of = [&](uint32_t x) -> uint32_t {
    if (!usable) return 0;
    const float value = min(max(x >= kPosInfKey ? high : key_to_float(x), low), high);
    return min(static_cast<uint32_t>(__fmul_rn(__fsub_rn(value, low), scale)), uint32_t{kBins - 1});
  };
  clear_bins(sm);
  for_each_candidate(sm, count, [&](uint32_t x) { atomicAdd(&sm.bins[bin_of(x)], 1u); });
  __syncthreads();
  BinHit hit = locate(sm, k);
  if (hit.count <= kSnapLimit) {
    return usable ? order_key(__fadd_rn(low, __fdiv_rn(static_cast<float>(hit.bin), scale))) : kZeroKey;
  }
  // Members of a bin are contiguous in key order, so from here a range of keys stands for them.
  uint32_t bottom = 0xffffffffu, top = 0;
  for_each_candidate(sm, count, [&](uint32_t x) {
    if (bin_of(x) != hit.bin) return;
    bottom = min(bottom, x);
    top = max(top, x);
  });
  while (true) {
    k -= static_cast<int>(hit.above);
    bottom = block_reduce<Reduce::kMin>(sm, bottom);
    top = block_reduce<Reduce::kMax>(sm, top);
    const uint32_t span = top - bottom;
    if (span == 0) return bottom;
    const int shift = max(0, 21 - __clz(span));  // 2048 bins over the span's bits
    clear_bins(sm);
    for_each_candidate(sm, count, [&](uint32_t x) {
      if (x - bottom <= span) atomicAdd(&sm.bins[(x - bottom) >> shift], 1u);
    });
    __syncthreads();
    hit = locate(sm, k);
    ++scans;
    const uint32_t edge = bottom + (hit.bin << shift);
    if (hit.count <= kSnapLimit) return edge;
    const uint32_t reach = min(span - (hit.bin << shift), (1u << shift) - 1);
    bottom = 0xffffffffu, top = 0;
    for_each_candidate(sm, count, [&](uint32_t x) {
      if (x - edge > reach) return;
      bottom = min(bottom, x);
      top = max(top, x);
    });
  }
}

// Steps through distinct values until count_greater < k <= count_greater_or_equal.
__device__ __forceinline__ Snap snap(Shared& sm, int count, int k) {
  if (count == k) {
    uint32_t least = 0xffffffffu;
    for_each_candidate(sm, count, [&](uint32_t x) { least = min(least, x); });
    return Snap{block_reduce<Reduce::kMin>(sm, least), 0};
  }
  Snap result{0, 0};
  result.key = histogram_start(sm, count, k, result.scans);
  while (true) {
    ++result.scans;
    uint32_t greater = 0, smaller = 0, up = 0xffffffffu, down = 0;
    for_each_candidate(sm, count, [&](uint32_t x) {
      greater += x > result.key;
      smaller += x < result.key;
      if (x > result.key) up = min(up, x);
      if (x < result.key) down = max(down, x);
    });
    leave<Reduce::kAdd>(sm, 0, greater);
    leave<Reduce::kAdd>(sm, 1, smaller);
    leave<Reduce::kMin>(sm, 2, up);
    leave<Reduce::kMax>(sm, 3, down);
    __syncthreads();
    greater = take<Reduce::kAdd>(sm, 0);
    smaller = take<Reduce::kAdd>(sm, 1);
    up = take<Reduce::kMin>(sm, 2);
    down = take<Reduce::kMax>(sm, 3);
    __syncthreads();
    if (static_cast<int>(greater) < k && k <= count - static_cast<int>(smaller)) return result;
    result.key = static_cast<int>(greater) >= k ? up : down;
  }
}

// Writes the selected positions in ascending order: candidates lie in thread order, so their positions
// go through a bitmap of the row.
__device__ __forceinline__ void partition(Shared& sm, Bitmaps& maps, int n, int count, int k, uint32_t kth,
                                          const Sink& sink) {
  const int words = (n + 31) / 32;
  for (int i = threadIdx.x; i < words; i += kThreads) maps.above[i] = maps.equal[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int position = sm.position[i];
    const uint32_t bit = 1u << (position & 31);
    if (sm.key[i] > kth) atomicOr(&maps.above[position >> 5], bit);
    if (sm.key[i] == kth) atomicOr(&maps.equal[position >> 5], bit);
  }
  __syncthreads();
  const int each = (words + kThreads - 1) / kThreads;
  const int first = min(words, static_cast<int>(threadIdx.x) * each);
  const int last = min(words, first + each);
  uint32_t above = 0, equal = 0;
  for (int i = first; i < last; ++i) {
    above += __popc(maps.above[i]);
    equal += __popc(maps.equal[i]);
  }
  cluster::Share share{0, k - block_reduce<Reduce::kAdd>(sm, above)};
  const uint32_t above_before = exclusive_sum(sm, above);
  share.pass(above_before, exclusive_sum(sm, equal));
  for (int i = first; i < last; ++i) {
    const uint32_t above_bits = maps.above[i];
    for (uint32_t bits = above_bits | maps.equal[i]; bits != 0; bits &= bits - 1) {
      const uint32_t bit = bits & -bits;
      const bool tie = (above_bits & bit) == 0;
      if (tie && share.ties == 0) continue;
      sink.put(share.first, 32 * i + __ffs(bit) - 1);
      share.pass(!tie, tie);
    }
  }
}

}  // namespace gvr_topk::gvr
