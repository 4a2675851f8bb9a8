// Derives an interval for the k-th key from a sample of some hundred keys: a pair of order statistics around
// the rank where the k-th key is expected. This assumes no distribution.
#pragma once

#include "cluster/row_context.cuh"
#include "core/key_interval.cuh"
#include "ptx/compare.cuh"
#include "ptx/math.cuh"
#include "ptx/registers.cuh"

namespace gvr_topk {

// If a greater share of a sample lies above the k-th value, the sample shows hardly anything below that
// value.
constexpr float kNearlyAllAbove = 0.96f;
// Every warp names two order statistics of its keys, this many standard deviations above and below the
// expected rank. So the 16 warps name 16 upper and 16 lower ends. The interval takes the third of each from
// outside, and one further in for each doubling of the CTAs: a sign test. For independent keys, and a share
// that was itself measured with 512 of them, one interval in 47,000 misses, or one in 8,000, 1,700, 400 and
// 120 for each step further in. A row of one CTA takes longest to be read again, and most other rows wait for
// it. Where few rows share the chip, each with many CTAs, a narrower interval is worth more.
constexpr float kMarginSigmas = 0.5f;
constexpr int kOutsiders = 2;

// Returns the square root of a variance. A variance that rounding made negative gives a negative result.
__device__ __forceinline__ float standard_deviation(float variance) {
  return variance * ptx::reciprocal_root(fmaxf(variance, 1e-30f));
}

// The share of a sample that lies above the k-th key, and the margin around the expected rank among 32 keys.
struct SampleRank {
  float share = 0.0f, margin = 0.0f;

  SampleRank() = default;

  __device__ __forceinline__ explicit SampleRank(float tail)
      : share(tail), margin(kMarginSigmas * standard_deviation(32.0f * tail * (1.0f - tail))) {
    ptx::keep(share);
    ptx::keep(margin);
  }
};

// Returns how many of the 4 * kVecs keys are greater than `mine`.
template <int kVecs, int kStride = 1>
__device__ __forceinline__ int rank_among(const uint4* keys, uint32_t mine) {
  float rank = ptx::kIntegerBase;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint4 other = keys[i * kStride];
    ptx::count_if_greater(rank, other.x, mine);
    ptx::count_if_greater(rank, other.y, mine);
    ptx::count_if_greater(rank, other.z, mine);
    ptx::count_if_greater(rank, other.w, mine);
  }
  return static_cast<int>(ptx::integer_of_sum(rank));
}

// Makes an interval whose ends are finite, or both infinity. Radix rounds handle the keys that such an
// interval leaves out.
__device__ __forceinline__ KeyInterval finite_interval(uint32_t lo, uint32_t hi, uint32_t source) {
  if (min(lo, hi) >= kPosInfKey) return KeyInterval{kPosInfKey, kPosInfKey, source};
  hi = min(max(hi, kLeastFiniteKey), kMostFiniteKey);  // A sample of hardly any keys may give the absent key.
  return KeyInterval{max(min(lo, hi), kLeastFiniteKey), hi, source};
}

// The interval if less than one key in eight lies above the k-th key, which is too few for each of 16 warps
// to tell much. The greatest eight keys of every warp are ranked together, four threads to a key. If the k-th
// key lies below the interval, the row may have to be read again, so the interval extends further down than
// up. This contains two block barriers.
template <typename T>
__device__ __forceinline__ KeyInterval tail_interval(const RowContext<T>& ctx, uint32_t key, float share,
                                                     int rank) {
  constexpr int kOfEach = 8;
  constexpr float kSigmasUp = 3.0f, kSigmasDown = 4.0f;  // standard deviations
  constexpr int kThreadsPerKey = 4;                      // threads that rank one key together
  constexpr int kVecs = kWarps * kOfEach / (4 * kThreadsPerKey);
  static_assert(kThreads == kThreadsPerKey * kWarps * kOfEach && kGreatestOfSample == kWarps * kOfEach);
  Shared& smem = *ctx.shared;
  uint32_t* const greatest = smem.warp_top8;
  // If keys are equal, more than eight may qualify; any eight of them serve.
  const uint32_t selected = __ballot_sync(0xffffffffu, rank < kOfEach);
  const int expected_rank = __popc(selected & ((1u << ctx.lane) - 1));
  if (rank < kOfEach && expected_rank < kOfEach) greatest[ctx.warp * kOfEach + expected_rank] = key;
  if (ctx.thread < 2) smem.interval_ends[ctx.thread][0] = kMaxKey;
  __syncthreads();
  const float expected = kThreads * share;
  const float error = standard_deviation(expected * (1.0f - share));
  const int upper = max(static_cast<int>(expected - kSigmasUp * error) - 1, 0);
  const int lower = static_cast<int>(ceilf(expected + kSigmasDown * error));
  const uint32_t mine = greatest[ctx.thread / kThreadsPerKey];
  const auto vecs = reinterpret_cast<const uint4*>(greatest) + ctx.thread % kThreadsPerKey;
  int among = rank_among<kVecs, kThreadsPerKey>(vecs, mine);
  among += __shfl_xor_sync(0xffffffffu, among, 1);
  among += __shfl_xor_sync(0xffffffffu, among, 2);
  const uint32_t top = __reduce_min_sync(0xffffffffu, among <= upper ? mine : kMaxKey);
  const uint32_t bottom = __reduce_min_sync(0xffffffffu, among <= lower ? mine : kMaxKey);
  if (ctx.lane == 0) {
    atomicMin(&smem.interval_ends[0][0], top);
    atomicMin(&smem.interval_ends[1][0], bottom);
  }
  ptx::reconverge(ctx.zero);
  __syncthreads();
  return finite_interval(smem.interval_ends[1][0], smem.interval_ends[0][0], kGuessRowSample);
}

// An interval around the (1 - share) quantile of a sample of one key per thread. Each warp reads the order
// statistics beside the expected rank off its own 32 keys. A sign test over the warps gives the interval
// (kMarginSigmas). This contains one block barrier.
template <typename T>
__device__ __forceinline__ KeyInterval sample_interval(const RowContext<T>& ctx, uint32_t key,
                                                       const SampleRank& above) {
  Shared& smem = *ctx.shared;
  const float share = above.share, margin = above.margin;
  reinterpret_cast<uint32_t*>(smem.sample)[ctx.thread] = key;
  __syncwarp();
  const int rank = rank_among<8>(smem.sample + 8 * ctx.warp, key);
  if (share < 1.0f / 8) return tail_interval(ctx, key, share, rank);
  const int present = __popc(__ballot_sync(0xffffffffu, key != kAbsentKey));
  const float expected_rank = share * static_cast<float>(present);
  const int upper = max(static_cast<int>(expected_rank - margin) - 1, 0);
  const int lower = min(static_cast<int>(ceilf(expected_rank + margin)), present - 1);
  // The r-th largest is the smallest key with no more than r greater ones.
  const uint32_t top = __reduce_min_sync(0xffffffffu, rank <= upper ? key : kMaxKey);
  const uint32_t bottom = __reduce_min_sync(0xffffffffu, rank <= lower ? key : kMaxKey);
  if (ctx.lane == 0) {
    smem.interval_ends[0][ctx.warp] = top;
    smem.interval_ends[1][ctx.warp] = ~bottom;
  }
  __syncthreads();
  const bool below = ctx.lane >= kWarps;
  const int outsiders = kOutsiders + ctx.log2_ctas;
  const uint32_t edge = smem.interval_ends[below][ctx.lane % kWarps];
  const bool near = rank_among<kWarps / 4>(reinterpret_cast<const uint4*>(smem.interval_ends[below]), edge) <=
                    (below && share > kNearlyAllAbove ? 0 : outsiders);
  const uint32_t hi = __reduce_min_sync(0xffffffffu, !below && near ? edge : kMaxKey);
  const uint32_t lo = ~__reduce_min_sync(0xffffffffu, below && near ? edge : kMaxKey);
  KeyInterval interval = finite_interval(lo, hi, kGuessRowSample);
  if (share > kNearlyAllAbove) {
    const float bottom_edge = interval.low();
    const float wider = bottom_edge - (interval.high() - bottom_edge);
    interval.lo = max(min(interval.lo, order_key(wider)), kLeastFiniteKey);
  }
  return interval;
}

}  // namespace gvr_topk
