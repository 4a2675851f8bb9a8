// Narrows the interval of a large k. A sample of one key per thread says little about a k-th value that has
// many elements beside it: all that lie between two of its order statistics would have to be listed. A larger
// sample is counted inside this interval, in one radix round over the cluster.
#pragma once

#include "cluster/guess.cuh"
#include "cluster/radix_select.cuh"
#include "cluster/row_job.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::fallback {

// The narrowed interval reaches so many standard deviations to either side of the expected rank, but should
// fill no more than this share of the list.
constexpr float kNarrowSigmas = 4.0f, kNarrowFill = 0.8f;
// Groups of lanes probe neighbours, because the sample's cost is the lines of memory that it reads.
constexpr int kNarrowLanes = 4, kNarrowElements = kNarrowLanes * kSampleVec;
// Probes of each thread at once, and log2 of the most probes times the keys of the list.
constexpr int kProbesAtOnce = 4, kLog2ProbesAndList = 18;

// Whether the first sample's interval would overfill the list.
template <typename T>
GVR_DEVICE bool needs_narrowing(const RowContext<T>& ctx) {
  return 2 * ctx.k > ctx.list.segment() << ctx.log2_ctas;
}

// log2 of the probes of each thread, at least one. With room for C keys in the list, 2^7 k (n - k) / C^2 of n
// elements or more are sampled. The k-th rank then has a standard deviation of at most C / 2^3.5 elements,
// and eight of these fill 0.71 of the list. A smaller list takes more probes, up to half of the row.
template <typename T>
GVR_DEVICE int log2_probes(const RowContext<T>& ctx) {
  const int log2_list = 31 - __clz(ctx.list.segment() << ctx.log2_ctas);
  const uint64_t pairs = uint64_t{static_cast<uint32_t>(ctx.k)} * (ctx.row.n - ctx.k);
  const auto wanted = static_cast<uint32_t>(pairs >> (2 * log2_list - 7));
  const int log2_least = log2_of(kSampleVec) + kLog2Threads + ctx.log2_ctas;  // of one probe a thread
  const int log2_sample = min(32 - __clz(wanted), 30 - __clz(ctx.row.n));
  return min(max(log2_sample - log2_least, 0), kLog2ProbesAndList - log2_list);
}

// Narrows an interval that one sample has given. Either all CTAs of a cluster call this, or none. Returns
// false if they have read different lengths, so that each would have an interval of its own.
template <typename T>
GVR_DEVICE bool narrow(const RowContext<T>& ctx, KeyInterval& interval, uint32_t parity) {
  Shared& smem = *ctx.shared;
  const KeyRange range{interval.lo, interval.hi - interval.lo};
  const int shift = range.shift<kLog2RadixBins>(), probes = 1 << log2_probes(ctx);
  smem.hist[ctx.thread] = 0;
  __syncthreads();
  RadixBins bins{smem.hist, range, shift};
#pragma unroll 1
  for (int first = 0; first < probes; first += kProbesAtOnce) {
    SampleVec<T> vec[kProbesAtOnce];
    const auto position = [&](int i) {
      const uint32_t thread = min(first + i, probes - 1) * kThreads + ctx.thread;
      const uint32_t line = (thread / kNarrowLanes) << ctx.log2_ctas | ctx.rank;
      const int elements = behind_first_probe(ctx.row, ctx.row.n) & -kNarrowElements;
      return first_probe(ctx.row) + (RowSampler::hashed_position(line, elements) & -kNarrowElements) +
             kSampleVec * static_cast<int>(thread % kNarrowLanes);
    };
#pragma unroll  // so that the loads overlap
    for (int i = 0; i < kProbesAtOnce; ++i) vec[i].fetch(ctx.row, position(i));
#pragma unroll
    for (int i = 0; i < kProbesAtOnce; ++i) {
      if (first + i >= probes) break;
      uint32_t key[kSampleVec] = {};
      vec[i].take(ctx.row, position(i), key);
#pragma unroll
      for (int e = 0; e < kSampleVec; ++e) bins.add(key[e]);
    }
  }
  sum_over_cluster(ctx, bins.above, parity);
  // A CTA that finds its row short makes one exchange, and then starts over if the lengths differ. So does
  // this one: another barrier of the cluster here would be one more than the other CTA makes.
  if (!read_headers(ctx, KeyInterval::everything()).agreed) return false;
  const float size = static_cast<float>(kSampleVec * kThreads * probes << ctx.log2_ctas);
  const float scale =
      __fdividef(size, static_cast<float>(ctx.row.n));  // ranks of the sample for each of the row
  const float expected = scale * static_cast<float>(ctx.k);
  const float most = 0.5f * kNarrowFill * scale * static_cast<float>(ctx.list.segment() << ctx.log2_ctas);
  const float deviation = standard_deviation(expected * (1.0f - __fdividef(expected, size)));
  const float margin = fminf(kNarrowSigmas * deviation, most) + 1.0f;
  const auto upper = static_cast<uint32_t>(fmaxf(expected - margin, 0.0f));
  const auto lower = static_cast<uint32_t>(expected + margin) + 1;
  const uint32_t above = smem.over_range;
  // A rank that lies outside of the interval leaves that end where it is.
  const BinHit first = smem.keys.locate(upper - above, ctx.thread);
  if (first.count != 0)
    interval.hi = min(interval.hi, range.base + (first.bin << shift) + ((1u << shift) - 1));
  __syncthreads();  // All threads have the bin.
  if (ctx.thread == 0) smem.keys.hit.count = 0;
  ptx::reconverge(ctx.zero);
  __syncthreads();
  const BinHit last = smem.keys.locate(lower - above, ctx.thread);
  if (last.count != 0) interval.lo = range.base + (last.bin << shift);
  restart_counts(ctx);
  return true;
}

}  // namespace gvr_topk::fallback
