// A bracket for the k-th key from a sample of some hundred keys: a pair of order statistics around the place
// where it is believed to stand, distribution-free.
#pragma once

#include "cluster/state.cuh"
#include "ptx/compare.cuh"

namespace gvr_topk::cluster {

// Hints that hit nearly always show nothing below the k-th value.
constexpr float kNearlyAll = 0.96f;
// Every warp names an order statistic this many standard deviations beside the place, and of 16 of those the
// ones this far from the outside are the bracket: a sign test. Of independent keys, and a share that was
// itself measured with 512 of them, it misses at either end once in 5,000 times, and there is no narrower one
// that misses as seldom.
constexpr float kBeside = 0.5f;
constexpr int kOutsiders = 4;

// What there is to guess from: one key per thread, and which share of them lies above the k-th.
struct Sample {
  uint32_t key;
  float share;
  uint32_t source;
};

__device__ __forceinline__ float deviation(float variance) {
  return variance > 0.0f ? variance * rsqrtf(variance) : 0.0f;
}

// How many of 4 * kVecs keys are greater than this one.
template <int kVecs>
__device__ __forceinline__ int rank_among(const uint4* keys, uint32_t mine) {
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint4 other = keys[i];
    ptx::count_if_greater(rank, other.x, mine);
    ptx::count_if_greater(rank, other.y, mine);
    ptx::count_if_greater(rank, other.z, mine);
    ptx::count_if_greater(rank, other.w, mine);
  }
  return rank;
}

// A bracket around the (1 - share) quantile of one key per thread. Each warp reads the order statistics
// beside that place off its own 32 keys; the bracket reaches from the fifth lowest of the lower ones to the
// fifth highest of the upper ones. One block barrier.
template <typename T>
__device__ __forceinline__ Bracket sample_bracket(const Task<T>& task, const Sample& sample) {
  Shared& sm = *task.shared;
  const uint32_t key = sample.key;
  const float share = sample.share;
  reinterpret_cast<uint32_t*>(sm.sample)[threadIdx.x] = key;
  __syncwarp();
  const int rank = rank_among<8>(sm.sample + 8 * task.warp, key);
  const int present = __popc(__ballot_sync(0xffffffffu, key != kAbsentKey));
  const float place = share * static_cast<float>(present);
  const float beside = kBeside * deviation(place * (1.0f - share));
  int upper = max(static_cast<int>(place - beside) - 1, 0);
  int lower = min(static_cast<int>(ceilf(place + beside)), present - 1);
  int outsiders_above = kOutsiders, outsiders_below = share > kNearlyAll ? 0 : kOutsiders;
  if (share < 1.0f / 32) {
    // Less than one in a warp: the greatest of each, and how many of those lie above, within three standard
    // deviations.
    const float expected = kWarps * (1.0f - __expf(-32 * share));
    const float reach = 3.0f * deviation(expected * (1.0f - expected / kWarps));
    upper = lower = 0;
    outsiders_above = static_cast<int>(expected - reach) - 1;
    outsiders_below = max(kWarps - 1 - static_cast<int>(ceilf(expected + reach)), 0);
  }
  // The r-th largest is the smallest key with no more than r greater ones.
  const uint32_t top = __reduce_min_sync(0xffffffffu, rank <= upper ? key : kMaxKey);
  const uint32_t bottom = __reduce_min_sync(0xffffffffu, rank <= lower ? key : kMaxKey);
  if (task.lane == 0) {
    sm.edge[0][task.warp] = top;
    sm.edge[1][task.warp] = ~bottom;
  }
  __syncthreads();
  const bool below = task.lane >= kWarps;
  const uint32_t edge = sm.edge[below][task.lane % kWarps];
  const bool near = rank_among<kWarps / 4>(reinterpret_cast<const uint4*>(sm.edge[below]), edge) <=
                    (below ? outsiders_below : outsiders_above);
  uint32_t hi = __reduce_min_sync(0xffffffffu, !below && near ? edge : kMaxKey);
  uint32_t lo = ~__reduce_min_sync(0xffffffffu, below && near ? edge : kMaxKey);
  // Bounds stay finite: what they leave out (infinities, NaN) is left to the radix rounds.
  hi = min(hi, kPosInfKey - 1);
  lo = max(min(lo, hi), kNegInfKey + 1);
  if (share > kNearlyAll) {
    const float bottom_edge = key_to_float(lo);
    lo = max(min(lo, order_key(bottom_edge - (key_to_float(hi) - bottom_edge))), kNegInfKey + 1);
  }
  return Bracket{lo, hi, sample.source};
}

}  // namespace gvr_topk::cluster
