// Shared memory and block-wide helpers of the four-phase kernel.
//
// The kernel is the paper's: one CTA of 512 threads per row, which it reads once per counting pass. A pass
// also leaves one bit per element, so that collecting needs the row no more than the candidates' keys. The
// kernel shares the emission of short rows and, for rows its search gives up on, the radix rounds with the
// cluster kernel, as a cluster of one.
#pragma once

#include "cluster/general.cuh"

namespace gvr_topk::gvr {

using cluster::kThreads;
using cluster::kWarps;
using cluster::Sink;

constexpr int kCapacity = 6144;  // candidates refinement holds: three times k (paper, section 5.3)
constexpr int kBins = 2048;
constexpr int kLog2Bins = log2_of(kBins);
constexpr int kHintPerThread = 2048 / kThreads;
constexpr int kPerThread = kCapacity / kThreads;
constexpr int kSnapLimit = 32;  // members of a bin that snap steps may walk through
constexpr int kSecantPasses = 4;
constexpr int kFloatPasses = 8;
// One bit per element; a row may start up to seven elements after a 16-byte boundary.
constexpr int kBitmapWords = kWarps * warp_span(static_cast<int32_t>(kFourPhaseMaxWidth) + 7, 0, 2) / 32;

// How the search for the threshold ended; the names are gvr_topk.evaluation.reference.DONE's.
enum class Done : int { kShort, kGuess, kSecant, kTie, kBisect, kKey, kPlateau };

// A histogram, and the members of the bin in question when they are few.
struct alignas(16) Bins {
  uint32_t fine[kBins + 4];     // the last counts what is in no bin: cheaper than a branch around
  uint32_t coarse[kBins / 32];  // sums of 32 bins
  uint32_t member[kSnapLimit];
  uint32_t members;  // may exceed the room
};

// Takes the place of the ring once the last word of the row has been counted.
struct Candidates {
  uint32_t key[kCapacity];
  int32_t position[kCapacity];  // ascending
};

struct alignas(128) Shared {
  uint32_t bitmap[kBitmapWords];  // elements that reach the threshold of the last pass
  Bins guess;
  Bins snap;
  uint32_t warp_value[2][4][kWarps];
  double warp_sum[kWarps];
};

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float positive_infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

enum class Reduce { kAdd, kMin, kMax };

template <Reduce kOp>
__device__ __forceinline__ uint32_t warp_reduce(uint32_t x) {
  if constexpr (kOp == Reduce::kAdd) return __reduce_add_sync(0xffffffffu, x);
  if constexpr (kOp == Reduce::kMin) return __reduce_min_sync(0xffffffffu, x);
  return __reduce_max_sync(0xffffffffu, x);
}

// Reductions of one value per thread over the block. Successive ones take turns with two sets of slots, so
// each costs one barrier: who leaves values in a set has met everybody since it was read.
struct Block {
  Shared& sm;
  int lane;
  int warp;
  int turn = 0;

  __device__ __forceinline__ explicit Block(Shared& shared)
      : sm(shared), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {}

  // `slot` tells reductions apart that share a barrier.
  template <Reduce kOp>
  __device__ __forceinline__ void leave(int slot, uint32_t x) {
    x = warp_reduce<kOp>(x);
    if (lane == 0) sm.warp_value[turn][slot][warp] = x;
  }

  __device__ __forceinline__ void meet() {
    __syncthreads();
    turn ^= 1;
  }

  template <Reduce kOp>
  __device__ __forceinline__ uint32_t take(int slot) const {
    constexpr uint32_t kNeutral = kOp == Reduce::kMin ? 0xffffffffu : 0;
    return warp_reduce<kOp>(lane < kWarps ? sm.warp_value[turn ^ 1][slot][lane] : kNeutral);
  }

  // Sum over the earlier warps.
  __device__ __forceinline__ uint32_t take_earlier(int slot) const {
    return warp_reduce<Reduce::kAdd>(lane < warp ? sm.warp_value[turn ^ 1][slot][lane] : 0);
  }

  template <Reduce kOp>
  __device__ __forceinline__ uint32_t reduce(uint32_t x) {
    leave<kOp>(0, x);
    meet();
    return take<kOp>(0);
  }
};

// Behind the next barrier the bins are empty.
__device__ __forceinline__ void clear(Bins& bins) {
  static_assert(kBins == 4 * kThreads);
  reinterpret_cast<uint4*>(bins.fine)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Bin that holds the rank-th largest of the items in the bins, of which there are as many. Every warp finds
// it for itself.
__device__ __forceinline__ BinHit locate(Bins& bins, uint32_t rank) {
  const uint4 four = reinterpret_cast<const uint4*>(bins.fine)[threadIdx.x];
  uint32_t sum = (four.x + four.y) + (four.z + four.w);
#pragma unroll
  for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if ((threadIdx.x & 7) == 0) bins.coarse[threadIdx.x >> 3] = sum;
  __syncthreads();
  const int lane = threadIdx.x & 31;
  const uint2 pair = reinterpret_cast<const uint2*>(bins.coarse)[lane];
  uint32_t above = suffix_sum(pair.x + pair.y) - pair.x - pair.y;
  const uint32_t owner = __ballot_sync(0xffffffffu, above < rank && rank <= above + pair.x + pair.y);
  const bool upper = rank <= above + pair.y;
  const int source = __ffs(owner) - 1;
  const int group = __shfl_sync(0xffffffffu, 2 * lane + upper, source);
  const uint32_t group_above = __shfl_sync(0xffffffffu, upper ? above : above + pair.y, source);
  const uint32_t count = bins.fine[32 * group + lane];
  above = group_above + suffix_sum(count) - count;
  const uint32_t found = __ballot_sync(0xffffffffu, above < rank && rank <= above + count);
  const int place = __ffs(found) - 1;
  return BinHit{static_cast<uint32_t>(32 * group + place), __shfl_sync(0xffffffffu, above, place),
                __shfl_sync(0xffffffffu, count, place)};
}

__device__ __forceinline__ void add_member(Bins& bins, uint32_t key) {
  const uint32_t slot = atomicAdd(&bins.members, 1u);
  if (slot < kSnapLimit) bins.member[slot] = key;
}

}  // namespace gvr_topk::gvr
