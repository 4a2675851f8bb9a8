// Phase 1, guess: statistics of the hinted values in the current row, and from them the first
// threshold (paper, section 4.2.1): their mean, or the quantile that last step's hit share points to.
#pragma once

#include "gvr/state.cuh"

namespace gvr_topk::gvr {

// Below the k-th value the quantile aims, by this share of the hint's misses: aiming at the k-th value
// itself, half the guesses would fall just short of k (gvr_topk.reference.QUANTILE_MARGIN).
constexpr double kQuantileMargin = 0.75;

struct Guess {
  float threshold;
  float least, greatest;  // of the values it was made from
  int values;             // how many; 0: nothing finite was found
  int low_count;          // estimate of the count at `least`
  uint32_t source;
};

// This thread's hinted values, or its part of the row sample that replaces them.
struct Sampled {
  uint32_t key[kHintPerThread];

  __device__ __forceinline__ bool finite(int i) const { return kNegInfKey < key[i] && key[i] < kPosInfKey; }
};

// The rank-th largest finite value, by radix digits of 11, 11 and 10 bits.
__device__ __forceinline__ float order_statistic(Shared& sm, const Sampled& sampled, uint32_t rank) {
  uint32_t base = 0, reach = 0xffffffffu;
  int shift = 21;
  while (true) {
    clear_bins(sm);
#pragma unroll
    for (int i = 0; i < kHintPerThread; ++i) {
      const uint32_t x = sampled.key[i] - base;
      if (sampled.finite(i) && x <= reach) atomicAdd(&sm.bins[x >> shift], 1u);
    }
    __syncthreads();
    const BinHit hit = locate(sm, rank);
    rank -= hit.above;
    base += hit.bin << shift;
    if (shift == 0) return key_to_float(base);
    reach = (1u << shift) - 1;
    shift = shift > 11 ? shift - 11 : 0;
  }
}

__device__ __forceinline__ uint32_t rank_of_share(double share, int values) {
  const int rank = static_cast<int>(ceilf(__fmul_rn(static_cast<float>(share), static_cast<float>(values))));
  return static_cast<uint32_t>(min(max(rank, 1), values));
}

// Least, greatest and number of the finite values.
__device__ __forceinline__ void measure(Shared& sm, const Sampled& sampled, Guess& guess) {
  uint32_t least = 0xffffffffu, greatest = 0, count = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    if (!sampled.finite(i)) continue;
    least = min(least, sampled.key[i]);
    greatest = max(greatest, sampled.key[i]);
    ++count;
  }
  leave<Reduce::kMin>(sm, 0, least);
  leave<Reduce::kMax>(sm, 1, greatest);
  leave<Reduce::kAdd>(sm, 2, count);
  __syncthreads();
  guess.least = key_to_float(take<Reduce::kMin>(sm, 0));
  guess.greatest = key_to_float(take<Reduce::kMax>(sm, 1));
  guess.values = static_cast<int>(take<Reduce::kAdd>(sm, 2));
  __syncthreads();
}

__device__ __forceinline__ float mean(Shared& sm, const Sampled& sampled, int values) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    if (sampled.finite(i)) sum += static_cast<double>(key_to_float(sampled.key[i]));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if ((threadIdx.x & 31) == 0) sm.warp_sum[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += sm.warp_sum[w];
  return static_cast<float>(sum / values);
}

template <typename T>
__device__ __forceinline__ Guess guess(Shared& sm, const cluster::Task<T>& task, Sampled& sampled,
                                       float alpha, bool quantile) {
  Guess guess;
  measure(sm, sampled, guess);
  if (guess.values > 0 && guess.least < guess.greatest) {
    guess.source = cluster::kGuessHint;
    // Most misses of a hint lie just below the k-th value, so twice the capacity estimates the count
    // there better than the row's length.
    guess.low_count = min(task.row.n, 2 * kCapacity);
    if (quantile && alpha >= 0.0f) {
      const double share = alpha + kQuantileMargin * alpha * (1.0 - alpha);
      guess.threshold = order_statistic(sm, sampled, rank_of_share(share, guess.values));
    } else {
      guess.threshold = mean(sm, sampled, guess.values);
    }
    return guess;
  }
  // Equal values say nothing about the row (a cold hint of zeros gathers one element k times).
  const int count = min(task.row.n, kHintPerThread * kThreads);
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const int s = i * kThreads + threadIdx.x;
    sampled.key[i] = s < count ? task.row.key(static_cast<int>(int64_t{s} * task.row.n / count)) : kAbsentKey;
  }
  measure(sm, sampled, guess);
  guess.low_count = task.row.n;
  guess.source = guess.values > 0 ? cluster::kGuessRowSample : cluster::kGuessNone;
  guess.threshold = 0.0f;
  if (guess.values > 0) {
    const double share = static_cast<double>((task.k + kCapacity) / 2) / task.row.n;
    guess.threshold = order_statistic(sm, sampled, rank_of_share(share, guess.values));
  }
  return guess;
}

}  // namespace gvr_topk::gvr
