// Radix rounds find, for any content of the row, an interval that holds the k-th key and whose elements fit
// the lists; ties end as an interval of one key. Each round looks at 9 bits of the key: every CTA makes a
// histogram, and the histograms are summed over the cluster.
//
// A histogram is sent in one exchange, like a list of keys, and every CTA sums up the histograms of all CTAs.
// So all CTAs have the same counts and take the same decisions. Rounds may start from a range that is known
// to hold the k-th key, so that values that share their leading digits are told apart at once.
#pragma once

#include "cluster/exchange.cuh"
#include "core/histogram.cuh"
#include "core/key_range.cuh"
#include "core/row_view.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// Sums the histograms of all CTAs into `keys`, and their `over` into `over_range`. The key lists carry the
// histograms, and the headers carry `over`.
template <typename T>
GVR_DEVICE void sum_over_cluster(const RowContext<T>& ctx, uint32_t over, uint32_t parity) {
  static_assert(kRadixBins == kThreads && Histogram::kBins == 2 * kRadixBins);
  Shared& smem = *ctx.shared;
  const int bin = ctx.thread;
  smem.keys.template clear<kThreads>();
  if (bin == 0) smem.counts = Counts{0, kRadixBins, 0};
  ptx::reconverge(ctx.zero);  // Lanes have counted different keys, and one thread has reset the counts.
  __syncthreads();            // All threads of the block have counted.
  over = __reduce_add_sync(0xffffffffu, over);
  ctx.list.put(bin, smem.hist[bin]);
  if (ctx.lane == 0) ptx::add_shared(smem.counts.above, over, ctx.zero);
  ptx::reconverge(ctx.zero);
  __syncthreads();
  send_and_wait(ctx, KeyInterval::everything(), parity, [] {});
  uint32_t sum = 0;
#pragma unroll 4
  for (int c = 0; c < ctx.ctas; ++c) sum += ctx.list.of(c)[bin];
  smem.keys.fine[bin] = sum;
  sum = __reduce_add_sync(0xffffffffu, sum);
  const uint32_t above = ctx.lane < ctx.ctas ? smem.header[ctx.lane].counts.above : 0;
  const uint32_t all = __reduce_add_sync(0xffffffffu, above);
  if (ctx.lane == 0) ptx::add_shared(smem.keys.coarse[bin >> Histogram::kLog2Group], sum, ctx.zero);
  ptx::store_shared_if(bin == 0, ptx::shared_address(&smem.over_range), all);
  ptx::reconverge(ctx.zero);
  __syncthreads();
}

// Narrows a range that holds the k-th key to an interval. `rounds` counts the rounds, and `exchanges` counts
// all exchanges of the launch, for their parity. add_keys(bins) adds this thread's keys. The lists must be
// free on entry and are free on return. The counts are not reset.
//
// Rounds cover the finite keys. A k-th key that is neither finite nor above the finite keys is that of -inf,
// and only two keys lie above the finite ones (+inf and NaN). So a masked row takes one round, and a row of
// infinities two. The number of rounds is bounded whatever values the rounds read: a row that is overwritten
// meanwhile may no longer have a k-th key where one was counted.
template <typename T, typename AddKeys>
GVR_DEVICE KeyInterval radix_select(const RowContext<T>& ctx, const KeyInterval& start, uint32_t& exchanges,
                                    int& rounds, AddKeys add_keys) {
  constexpr int kMostRounds = 2 + (32 + kLog2RadixBins - 1) / kLog2RadixBins;
  Shared& smem = *ctx.shared;
  if (start.hi <= kNegInfKey) return KeyInterval::only(kNegInfKey);
  if (start.lo > kPosInfKey) return KeyInterval::only(kMaxKey);
  const KeyRange above_finite{kPosInfKey, kMaxKey - kPosInfKey};
  const uint32_t base = max(start.lo, kLeastFiniteKey);
  KeyRange range{base, max(min(start.hi, kMostFiniteKey), base) - base};
  if (base > kMostFiniteKey) range = above_finite;
  uint32_t rank = ctx.k;
  bool relative = false;  // Whether `rank` counts from the top of the range instead of the row.
#pragma unroll 1
  for (int round = 0; round < kMostRounds; ++round) {
    const int shift = range.shift<kLog2RadixBins>();
    smem.hist[ctx.thread] = 0;
    __syncthreads();
    RadixBins bins{smem.hist, range, shift};
    add_keys(bins);
    ++rounds;
    sum_over_cluster(ctx, bins.above, exchanges++ & 1);
    const uint32_t above_range = relative ? 0 : smem.over_range;
    const BinHit hit = smem.keys.locate(rank - above_range, ctx.thread);
    const bool is_above = above_range >= rank, found = !is_above && hit.count != 0;
    bool fits = true;
    if (found && ctx.lane < ctx.ctas) {
      fits = ctx.list.of(ctx.lane)[hit.bin] <= static_cast<uint32_t>(ctx.list.segment());
    }
    ptx::reconverge(ctx.zero);
    fits = __all_sync(0xffffffffu, fits);
    cluster_sync(ctx.ctas);  // All CTAs have read the lists and the sums.
    if (is_above && range.base != kPosInfKey) {
      range = above_finite;
      continue;
    }
    if (!found) return KeyInterval::only(kNegInfKey);
    if (range.base == kPosInfKey) return KeyInterval::only(hit.bin == 0 ? kPosInfKey : kMaxKey);
    rank -= above_range + hit.above;
    relative = true;
    range.narrow(hit.bin, shift);
    if (range.length == 0 || fits) break;
  }
  return KeyInterval{range.base, range.base + range.length, kGuessNone};
}

}  // namespace gvr_topk
