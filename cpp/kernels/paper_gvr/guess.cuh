// Phase 1, guess: takes statistics of the hinted values in the current row, and from them the first threshold
// (paper, section 4.2.1): their mean, or the quantile that the last step's hit share points to.
#pragma once

#include "core/key_range.cuh"
#include "core/lane_ranks.cuh"
#include "paper_gvr/block.cuh"

namespace gvr_topk::paper_gvr {

// The quantile aims below the k-th value, by this share of the hint's misses: if it aimed at the k-th value
// itself, half of the guesses would fall just short of k
// (gvr_topk.evaluation.paper_reference.QUANTILE_MARGIN).
constexpr double kQuantileMargin = 0.75;

struct Guess {
  float threshold;
  float least, greatest;  // extremes of the values that the threshold comes from
  int values;             // number of those values; 0: nothing finite was found
  int low_count;          // estimate of how many elements reach `least`
  uint32_t source;
};

// This thread's hinted values, or its part of the row sample that replaces them.
struct GuessSample {
  uint32_t key[kHintPerThread];

  __device__ __forceinline__ bool finite(int i) const { return kNegInfKey < key[i] && key[i] < kPosInfKey; }
};

// The rank-th largest of the finite values, which lie between `least` and `greatest`.
__device__ __forceinline__ float order_statistic(PaperShared& smem, const GuessSample& sampled, float least,
                                                 float greatest, uint32_t rank) {
  SearchBins& bins = smem.guess;
  KeyRange range{order_key(least), order_key(greatest) - order_key(least)};
#pragma unroll 1
  while (true) {
    const int shift = range.shift<kLog2Bins>();
#pragma unroll
    for (int i = 0; i < kHintPerThread; ++i) {
      const uint32_t x = sampled.key[i];
      atomicAdd(&bins.fine[range.contains(x) ? range.bin(x, shift) : kBins], 1u);
    }
    __syncthreads();
    const BinHit hit = locate(bins, rank);
    rank -= hit.above;
    range.narrow(hit.bin, shift);
    if (range.length == 0) return key_to_float(range.base);
    if (hit.count <= kSnapLimit) {
#pragma unroll
      for (int i = 0; i < kHintPerThread; ++i) {
        if (range.contains(sampled.key[i])) add_member(bins, sampled.key[i]);
      }
      __syncthreads();
      const int lane = threadIdx.x & 31;
      ptx::reconverge(ptx::unknown_zero());
      return key_to_float(rank_directly(bins.member[lane], static_cast<int>(hit.count), rank, lane));
    }
    __syncthreads();  // All threads have located the rank.
    clear(bins);
    __syncthreads();
  }
}

__device__ __forceinline__ uint32_t rank_of_share(double share, int values) {
  const int rank = static_cast<int>(ceilf(__fmul_rn(static_cast<float>(share), static_cast<float>(values))));
  return static_cast<uint32_t>(min(max(rank, 1), values));
}

// Stores this warp's part of the sum of the finite values. mean() reads it after the next block barrier.
__device__ __forceinline__ void store_partial_sum(Block& block, const GuessSample& sampled) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    if (sampled.finite(i)) sum += static_cast<double>(key_to_float(sampled.key[i]));
  }
  ptx::reconverge(ptx::unknown_zero());
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (block.lane == 0) block.smem.warp_sum[block.warp] = sum;
}

__device__ __forceinline__ float mean(const PaperShared& smem, int values) {
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += smem.warp_sum[w];
  return static_cast<float>(sum / values);
}

// Sets the least, the greatest and the number of the finite values.
__device__ __forceinline__ void set_extremes(Block& block, const GuessSample& sampled, Guess& guess) {
  uint32_t least = 0xffffffffu, greatest = 0, count = 0;
#pragma unroll
  for (int i = 0; i < kHintPerThread; ++i) {
    const bool finite = sampled.finite(i);
    least = min(least, finite ? sampled.key[i] : 0xffffffffu);
    greatest = max(greatest, finite ? sampled.key[i] : 0);
    count += finite;
  }
  block.store_partial<Reduce::kMin>(0, least);
  block.store_partial<Reduce::kMax>(1, greatest);
  block.store_partial<Reduce::kAdd>(2, count);
  block.sync();
  guess.least = key_to_float(block.reduce<Reduce::kMin>(0));
  guess.greatest = key_to_float(block.reduce<Reduce::kMax>(1));
  guess.values = static_cast<int>(block.reduce<Reduce::kAdd>(2));
}

template <typename T>
__device__ __forceinline__ Guess guess(Block& block, const RowContext<T>& ctx, GuessSample& sampled,
                                       float hint_share, bool quantile) {
  Guess guess;
  quantile = quantile && hint_share >= 0.0f && hint_share <= 1.0f;  // Other states are not a hint share.
  if (!quantile) store_partial_sum(block, sampled);
  set_extremes(block, sampled, guess);
  if (guess.values > 0 && guess.least < guess.greatest) {
    guess.source = kGuessHint;
    // Most misses of a hint lie just below the k-th value, so twice the capacity is a better estimate of the
    // count at `least` than the row's length.
    guess.low_count = min(ctx.row.n, 2 * kCapacity);
    if (!quantile) {
      guess.threshold = mean(block.smem, guess.values);
      return guess;
    }
  } else {
    // Equal values say nothing about the row (a cold hint of zeros gathers one element k times), so a sample
    // of the row replaces them.
    constexpr int kSample = kHintPerThread * kThreads;
    static_assert(kSample * kPaperMaxWidth <= 0xffffffffu, "a product of 32 bits");
    const int count = min(ctx.row.n, kSample);
#pragma unroll
    for (int i = 0; i < kHintPerThread; ++i) {
      const uint32_t s = i * kThreads + threadIdx.x;
      const bool there = s < static_cast<uint32_t>(count);
      const uint32_t key = ctx.row.key(static_cast<int>(there ? s * ctx.row.n / count : 0));
      sampled.key[i] = there ? key : kAbsentKey;
    }
    set_extremes(block, sampled, guess);
    guess.low_count = ctx.row.n;
    guess.source = guess.values > 0 ? kGuessRowSample : kGuessNone;
    guess.threshold = 0.0f;
    if (guess.values == 0) return guess;
  }
  const double share = guess.source == kGuessHint
                           ? hint_share + kQuantileMargin * hint_share * (1.0 - hint_share)
                           : static_cast<double>((ctx.k + kCapacity) / 2) / ctx.row.n;
  guess.threshold =
      order_statistic(block.smem, sampled, guess.least, guess.greatest, rank_of_share(share, guess.values));
  return guess;
}

}  // namespace gvr_topk::paper_gvr
