// Phase 1, guess: takes statistics of the hinted values in the current row, and from them the first threshold
// (paper, section 4.2.1): their mean, or the quantile that the last step's hit share points to.
#pragma once

#include "paper_gvr/config.cuh"

namespace gvr_topk::paper_gvr {

// The quantile aims below the k-th value, by this share of the hint's misses, or half of the guesses would
// fall just short of k (gvr_topk.evaluation.paper_reference.QUANTILE_MARGIN).
constexpr double kQuantileMargin = 0.75;

struct Guess {
  float threshold;
  float least, greatest;  // extremes of the finite values that the threshold comes from
  int values;             // number of those values; if it is 0, the threshold is 0 as well
  int low_count;          // estimate of how many elements reach `least`
  GuessSource source;
};

// This thread's hinted values, or its part of the row sample that replaces them.
struct GuessSample {
  uint32_t key[kHintPerThread];

  template <typename Visit>
  GVR_DEVICE void for_each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kHintPerThread; ++i) visit(key[i]);
  }
};

// The mean of the finite values, in double, as in the model.
template <typename T>
GVR_DEVICE float mean_value(const PaperContext<T>& ctx, const GuessSample& sampled, int values) {
  ptx::reconverge(ctx.zero);
  double sum = 0;
  sampled.for_each([&](uint32_t x) { sum += is_finite_key(x) ? static_cast<double>(key_to_float(x)) : 0; });
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (ctx.lane == 0) ctx.own.value_sum[ctx.warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += ctx.own.value_sum[w];
  return static_cast<float>(sum / values);
}

// `hint_share`: the first number of the row's state, which is a share only if it lies between 0 and 1. If the
// hinted values say nothing, a sample of the row replaces them.
template <typename T>
GVR_DEVICE Guess guess(const PaperContext<T>& ctx, GuessSample& sampled, float hint_share, bool by_quantile) {
  const int n = ctx.row.n;
  const auto for_each_finite = [&](auto visit) {
    sampled.for_each([&](uint32_t x) {
      if (is_finite_key(x)) visit(x);
    });
  };
  KeyStatistics finite = key_statistics(ctx, for_each_finite);
  // Most misses of a hint lie just below the k-th value, so twice the capacity is a better estimate of the
  // count at `least` than the row's length.
  int low_count = min(n, 2 * kCapacity);
  GuessSource source = kGuessHint;
  by_quantile = by_quantile && hint_share >= 0.0f && hint_share <= 1.0f;
  double share = hint_share + kQuantileMargin * hint_share * (1.0 - hint_share);
  // Equal values say nothing about the row: a cold hint of zeros gathers one element k times.
  if (!(key_to_float(finite.least) < key_to_float(finite.greatest))) {
    constexpr int kSample = kHintPerThread * kThreads;
    static_assert(kSample * kPaperMaxWidth <= 0xffffffffu, "a product of 32 bits");
    const uint32_t count = min(n, kSample);
#pragma unroll
    for (int i = 0; i < kHintPerThread; ++i) {
      const uint32_t s = i * kThreads + ctx.thread;
      const uint32_t key = ctx.row.key(static_cast<int>(s < count ? s * n / count : 0));
      sampled.key[i] = s < count ? key : kAbsentKey;
    }
    __syncthreads();  // All threads have read the statistics of the hint.
    finite = key_statistics(ctx, for_each_finite);
    low_count = n;
    source = finite.count > 0 ? kGuessRowSample : kGuessNone;
    by_quantile = finite.count > 0;
    share = static_cast<double>((ctx.k + kCapacity) / 2) / n;
  }
  const int values = static_cast<int>(finite.count);
  Guess guess{0.0f, key_to_float(finite.least), key_to_float(finite.greatest), values, low_count, source};
  if (by_quantile) {
    const float rank = ceilf(__fmul_rn(static_cast<float>(share), static_cast<float>(values)));
    const KeyOfRank quantile = key_in_range(ctx, ctx.own.bins, finite.least, finite.greatest,
                                            min(max(static_cast<int>(rank), 1), values),
                                            [&](auto visit) { sampled.for_each(visit); });
    guess.threshold = key_to_float(quantile.key);
  } else if (values > 0) {
    guess.threshold = mean_value(ctx, sampled, values);
  }
  return guess;
}

}  // namespace gvr_topk::paper_gvr
