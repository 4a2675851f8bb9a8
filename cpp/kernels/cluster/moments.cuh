// Computes the mean and standard deviation of a sample of the row, from which predictions start.
//
// All steps sample the same positions of the buffer, so the sampling error changes little from step to step.
// The loads need neither hint nor length, and no CTA depends on another.
#pragma once

#include "cluster/sample.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// This thread's probes of the row. They are taken before the row's length is known, so `row.n` is that of the
// buffer. If `alike`, all CTAs probe the same positions; otherwise the CTAs divide a larger sample, and each
// thread takes one probe of its CTA's part. Probes land in memory that no other CTA stores to, because a copy
// may land late and another CTA's store may arrive early.
template <typename T, int kProbes>
struct RowProbe {
  static_assert(kProbes <= kMaxProbes);
  bool alike;
  int span;
  int at[kProbes];
  uint4* zone[kProbes];  // where this thread's probes land

  // Starts the copies. They go to shared memory, because with loads to registers the wait for the length
  // would be a wait for the probes too. Second probes land in `store`, kThreads vectors that only this CTA
  // uses and that serve another purpose only later.
  GVR_DEVICE RowProbe(const RowContext<T>& ctx, const LaunchTraits& traits, uint4* store = nullptr)
      : alike(traits.has(LaunchTraits::kReadsState)) {
    zone[0] = ctx.shared->landing + ctx.thread;
    if constexpr (kProbes > 1) zone[1] = store + ctx.thread;
    fetch(ctx, traits);
  }

  // Probes again, without waiting for the copies under way. The new probes land in `store`. It must have
  // kProbes * kThreads vectors that nothing else uses until the copies have landed.
  GVR_DEVICE void fetch_into(uint4* store, const RowContext<T>& ctx, const LaunchTraits& traits) {
#pragma unroll
    for (int i = 0; i < kProbes; ++i) zone[i] = store + i * kThreads + ctx.thread;
    fetch(ctx, traits);
  }

  // Probes the first `row.n` elements.
  GVR_DEVICE void fetch(const RowContext<T>& ctx, const LaunchTraits& traits) {
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

  // The elements that a probe has read. The copies must have landed.
  GVR_DEVICE SampleVec<T> seen(int probe = 0) const {
    SampleVec<T> neighbours;
    neighbours.load(zone[probe]);
    return neighbours;
  }

  // Whether these probes can serve as those of a row of length n, because hardly any of them lies behind the
  // row's end.
  GVR_DEVICE bool serves(const LaunchTraits& traits, int n) const {
    return traits.has(LaunchTraits::kAligned) && !alike && n > span - span / 16;
  }
};

// A sample says too little if less than this share of its probes count. The probes of a thread count if they
// lie in the row and the sum of their squares is finite. In a row that is masked nearly everywhere, none
// count.
constexpr float kLeastCounted = 0.125f;
constexpr float kTooFewCounted = -1.0f, kNoneCounted = -2.0f;

struct Moments {
  float mean = 0.0f,
        deviation = 0.0f;  // kTooFewCounted or kNoneCounted if too few probes count

  Moments() = default;

  // The moments of a row that was not sampled at fixed positions.
  GVR_DEVICE static Moments unknown() {
    Moments moments;
    moments.deviation = kTooFewCounted;
    return moments;
  }

  GVR_DEVICE explicit Moments(const MissedGuess& missed) : mean(missed.mean), deviation(missed.deviation) {}

  // The moments of a sample that is the same in all CTAs. The computation contains one block barrier.
  template <typename T, int kProbes>
  GVR_DEVICE Moments(const RowContext<T>& ctx, const RowProbe<T, kProbes>& probe) {
    Shared& smem = *ctx.shared;
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
    if ((ctx.lane & 15) == 0) smem.sample_sums[ctx.lane + ctx.warp] = mine;
    const float count = static_cast<float>(kProbes * kSampleVec * __syncthreads_count(counts));
    // In every group of eight lanes, the lower four take the sums of four warps each, and the upper four take
    // the squares of the same warps: lane i + 4 has the squares for lane i.
    static_assert(kWarps == 16);
    const float4 four = reinterpret_cast<const float4*>(smem.sample_sums)[ctx.lane & 7];
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

  GVR_DEVICE bool are_known() const { return deviation >= 0.0f; }
  GVR_DEVICE bool counted_none() const { return deviation == kNoneCounted; }
};

}  // namespace gvr_topk
