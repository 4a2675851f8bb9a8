// Mean and standard deviation of a sample of the row, with which predictions start.
//
// All steps sample the same positions of the buffer, so the sampling error changes little from step to step.
// The loads need neither hint nor length, and no CTA needs another.
#pragma once

#include "core/row_sample.cuh"
#include "core/sample_interval.cuh"
#include "ptx/math.cuh"

namespace gvr_topk {

// This thread's probes of the row, taken before its length is known: `row.n` is the buffer's. If `alike`, all
// CTAs probe the same positions; otherwise each takes one probe in its own part of a larger sample. What they
// read lands in memory that no other CTA stores to, because a copy may come late, and another CTA's store
// early.
template <typename T, int kProbes>
struct RowProbe {
  static_assert(kProbes <= kMaxProbes);
  bool alike;
  int span;
  int at[kProbes];
  uint4* zone[kProbes];  // where this thread's probes land

  // Starts the copies, to shared memory: registers would make whatever waits for the length wait for them
  // too. Second probes land in `store`, kThreads vectors that only this CTA uses, and for something else only
  // later.
  __device__ __forceinline__ RowProbe(const RowContext<T>& ctx, const LaunchTraits& traits,
                                      uint4* store = nullptr)
      : alike(traits.has(LaunchTraits::kReadsState)) {
    zone[0] = ctx.shared->landing + ctx.thread;
    if constexpr (kProbes > 1) zone[1] = store + ctx.thread;
    fetch(ctx, traits);
  }

  // Probes again, without waiting for the copies under way: the new ones land in `store`, kProbes * kThreads
  // vectors that nothing else uses until then.
  __device__ __forceinline__ void fetch_into(uint4* store, const RowContext<T>& ctx,
                                             const LaunchTraits& traits) {
#pragma unroll
    for (int i = 0; i < kProbes; ++i) zone[i] = store + i * kThreads + ctx.thread;
    fetch(ctx, traits);
  }

  // Probes the first `row.n` elements.
  __device__ __forceinline__ void fetch(const RowContext<T>& ctx, const LaunchTraits& traits) {
    span = ctx.row.n;
#pragma unroll
    for (int i = 0; i < kProbes; ++i) {
      if (i > 0 && !alike) break;
      if (alike) {
        const int line =
            RowSampler::hashed_position((i * kThreads + ctx.thread) / kProbeLanes, span & -kProbeElements) &
            -kProbeElements;
        at[i] = line + kSampleVec * (ctx.thread % kProbeLanes);
      } else {
        at[i] = RowSampler::hashed_position((ctx.thread << ctx.log2_ctas) + ctx.rank, span);
      }
      if (!traits.has(LaunchTraits::kAligned)) continue;
      const uint32_t target = ptx::shared_address(zone[i]);
      if constexpr (sizeof(T) == 4) {
        ptx::copy_async(target, ctx.row.data + at[i]);
      } else {
        ptx::copy_half_async(target, ctx.row.data + at[i]);
      }
    }
    ptx::commit_copies();
  }

  // What a probe has read, once the copies have come.
  __device__ __forceinline__ SampleVec<T> seen(int probe = 0) const {
    SampleVec<T> neighbours;
    neighbours.load(zone[probe]);
    return neighbours;
  }

  // Whether these probes serve as those of a row of known length, because hardly any lies behind its end.
  __device__ __forceinline__ bool serves(const LaunchTraits& traits, int n) const {
    return traits.has(LaunchTraits::kAligned) && !alike && n > span - span / 16;
  }
};

// A sample says too little if less than this share of its probes count. A probe counts if all its elements
// are finite: in a row that is masked nearly everywhere, none does.
constexpr float kLeastCounted = 0.125f;
constexpr float kTooFewCounted = -1.0f, kNoneCounted = -2.0f;

struct Moments {
  float mean = 0.0f,
        deviation = 0.0f;  // the deviation is kTooFewCounted or kNoneCounted where too little counts

  Moments() = default;

  // Of a row that was not sampled at fixed positions.
  __device__ __forceinline__ static Moments unknown() {
    Moments moments;
    moments.deviation = kTooFewCounted;
    return moments;
  }

  __device__ __forceinline__ explicit Moments(const MissedGuess& missed)
      : mean(missed.mean), deviation(missed.deviation) {}

  // Moments of a sample that is the same in all CTAs. It takes one block barrier.
  template <typename T, int kProbes>
  __device__ __forceinline__ Moments(const RowContext<T>& ctx, const RowProbe<T, kProbes>& probe) {
    Shared& sm = *ctx.shared;
    float sum = 0.0f, squares = 0.0f;
    bool counts = true;
#pragma unroll
    for (int i = 0; i < kProbes; ++i) {
      const SampleVec<T> seen = probe.seen(i);
      counts &= probe.at[i] + kSampleVec <= ctx.row.n;
#pragma unroll
      for (int e = 0; e < kSampleVec; ++e) {
        sum += seen.value(e);
        squares = fmaf(seen.value(e), seen.value(e), squares);
      }
    }
    counts &= squares < __int_as_float(0x7f800000);
    // One half of the warp adds up the sums, the other half the squares.
    const bool upper = (ctx.lane & 16) != 0;
    float mine = counts ? (upper ? squares : sum) : 0.0f;
    const float theirs = counts ? (upper ? sum : squares) : 0.0f;
    mine += __shfl_xor_sync(0xffffffffu, theirs, 16);
#pragma unroll
    for (int d = 8; d > 0; d /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, d);
    if ((ctx.lane & 15) == 0) sm.moment[ctx.lane + ctx.warp] = mine;
    const float count = static_cast<float>(kProbes * kSampleVec * __syncthreads_count(counts));
    // Each lane takes four warps' sums; the lane four further has the squares that belong to them.
    static_assert(kWarps == 16);
    const float4 four = reinterpret_cast<const float4*>(sm.moment)[ctx.lane & 7];
    float all = (four.x + four.y) + (four.z + four.w);
    all += __shfl_xor_sync(0xffffffffu, all, 1);
    all += __shfl_xor_sync(0xffffffffu, all, 2);
    const float other = __shfl_xor_sync(0xffffffffu, all, 4);
    const bool squared = (ctx.lane & 4) != 0;
    const float share = ptx::reciprocal(count);
    mean = (squared ? other : all) * share;
    deviation = standard_deviation((squared ? all : other) * share - mean * mean);
    if (count < kLeastCounted * kProbes * kSampleVec * kThreads)
      deviation = count > 0 ? kTooFewCounted : kNoneCounted;
  }

  __device__ __forceinline__ bool are_known() const { return deviation >= 0.0f; }
  __device__ __forceinline__ bool counted_none() const { return deviation == kNoneCounted; }
};

}  // namespace gvr_topk
