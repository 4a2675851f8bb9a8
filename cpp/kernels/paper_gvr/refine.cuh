// Phase 4, refine: snaps to the exact k-th value, and selects (paper, section 4.2.4).
#pragma once

#include "core/key_range.cuh"
#include "core/lane_ranks.cuh"
#include "core/output_writer.cuh"
#include "fallback/emit.cuh"
#include "paper_gvr/collect.cuh"

namespace gvr_topk::paper_gvr {

constexpr uint32_t kFiniteKeys = kPosInfKey - kLeastFiniteKey;

struct Snap {
  uint32_t key;  // the exact k-th key
  int scans;
};

// Calls visit(key) for this thread's part of all candidates. A block barrier has passed since their stores.
template <typename Visit>
__device__ __forceinline__ void for_each_candidate(const Candidates& candidates, int count, Visit visit) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads) visit(candidates.key[i]);
}

// Steps through distinct values until count_greater < k <= count_greater_or_equal.
__device__ __forceinline__ Snap walk(Block& block, const Candidates& candidates, int count, int k,
                                     Snap from) {
#pragma unroll 1
  while (true) {
    ++from.scans;
    uint32_t greater = 0, smaller = 0, up = 0xffffffffu, down = 0;
    for_each_candidate(candidates, count, [&](uint32_t x) {
      greater += x > from.key;
      smaller += x < from.key;
      if (x > from.key) up = min(up, x);
      if (x < from.key) down = max(down, x);
    });
    block.store_partial<Reduce::kAdd>(0, greater);
    block.store_partial<Reduce::kAdd>(1, smaller);
    block.store_partial<Reduce::kMin>(2, up);
    block.store_partial<Reduce::kMax>(3, down);
    block.sync();
    greater = block.reduce<Reduce::kAdd>(0);
    smaller = block.reduce<Reduce::kAdd>(1);
    if (static_cast<int>(greater) < k && k <= count - static_cast<int>(smaller)) return from;
    from.key = static_cast<int>(greater) >= k ? block.reduce<Reduce::kMin>(2) : block.reduce<Reduce::kMax>(3);
  }
}

// Computes where the steps of `walk` would end, and their number, from a list of all candidates between
// `edge` and the k-th key. The k-th key is the list's rank-th largest.
__device__ __forceinline__ Snap walk_list(uint32_t mine, int count, uint32_t rank, uint32_t edge, int scans,
                                          int lane) {
  ptx::reconverge(ptx::unknown_zero());
  const uint32_t kth = rank_directly(mine, count, rank, lane);
  const bool passed = edge < kth ? edge < mine && mine <= kth : kth <= mine && mine < edge;
  const uint32_t alike = __match_any_sync(0xffffffffu, lane < count ? mine : kAbsentKey);
  const bool first_alike = __ffs(alike) - 1 == lane;
  const uint32_t steps = __popc(__ballot_sync(0xffffffffu, lane < count && passed && first_alike));
  return Snap{kth, scans + 1 + static_cast<int>(steps)};
}

// Splits a bin with too many members again, into bins that are even in key, because an outlier has stretched
// the range of values. `bottom` and `top` are the extremes of this thread's members. Members of a bin are
// contiguous in key order, so a range of keys stands for them.
__device__ __forceinline__ Snap split_bin(Block& block, const Candidates& candidates, int count,
                                          uint32_t rank, uint32_t bottom, uint32_t top) {
  SearchBins& bins = block.smem.snap;
  int scans = 0;
#pragma unroll 1
  while (true) {
    block.store_partial<Reduce::kMin>(0, bottom);
    block.store_partial<Reduce::kMax>(1, top);
    block.sync();
    bottom = block.reduce<Reduce::kMin>(0);
    top = block.reduce<Reduce::kMax>(1);
    KeyRange range{bottom, top - bottom};
    if (range.length == 0) return Snap{bottom, scans + 1};
    const int shift = range.shift<kLog2Bins>();
    clear(bins);
    __syncthreads();
    for_each_candidate(candidates, count, [&](uint32_t x) {
      atomicAdd(&bins.fine[range.contains(x) ? range.bin(x, shift) : kBins], 1u);
    });
    __syncthreads();
    const BinHit hit = locate(bins, rank);
    ++scans;
    rank -= hit.above;
    range.narrow(hit.bin, shift);
    const bool few = hit.count <= kSnapLimit;
    bottom = 0xffffffffu, top = 0;
    for_each_candidate(candidates, count, [&](uint32_t x) {
      if (!range.contains(x)) return;
      if (few) add_member(bins, x);
      bottom = min(bottom, x);
      top = max(top, x);
    });
    if (!few) continue;
    __syncthreads();
    return walk_list(bins.member[block.lane], static_cast<int>(hit.count), rank, range.base, scans,
                     block.lane);
  }
}

// Finds the exact k-th key, starting at the lower edge of the bin that holds it; bins are even in value.
__device__ __forceinline__ Snap snap(Block& block, const ThreadCandidates& own, const Candidates& candidates,
                                     int count, int k) {
  if (count == k) {
    uint32_t least = 0xffffffffu;
    own.for_each([&](int, uint32_t x) { least = min(least, x - 1); });  // An absent key wraps to the maximum.
    return Snap{block.reduce_all<Reduce::kMin>(least) + 1, 0};
  }
  uint32_t low_key = 0xffffffffu, high_key = 0;  // distances from the least finite key
  own.for_each([&](int, uint32_t x) {
    const uint32_t distance = x - kLeastFiniteKey;
    low_key = min(low_key, distance);
    high_key = max(high_key, distance < kFiniteKeys ? distance : 0);
  });
  block.store_partial<Reduce::kMin>(0, low_key);
  block.store_partial<Reduce::kMax>(1, high_key);
  block.sync();
  low_key = block.reduce<Reduce::kMin>(0);
  high_key = block.reduce<Reduce::kMax>(1);
  const bool finite = low_key < kFiniteKeys;
  const float low = finite ? key_to_float(kLeastFiniteKey + low_key) : 0.0f;
  const float high = finite ? key_to_float(kLeastFiniteKey + high_key) : 0.0f;
  float scale = __fdiv_rn(static_cast<float>(kBins), __fsub_rn(high, low));
  const bool usable = is_finite(scale) && scale > 0.0f;
  if (!usable) scale = 0.0f;  // Then all candidates fall into the lowest bin.
  const auto bin_of = [&](uint32_t x) -> uint32_t {
    const float value = fmaxf(fminf(key_to_float(x), high), low);  // NaN falls into the highest bin.
    return min(__float2uint_rz(__fmul_rn(__fsub_rn(value, low), scale)), uint32_t{kBins - 1});
  };

  SearchBins& bins = block.smem.snap;
  uint32_t bin[kPerThread];
  own.for_each([&](int r, uint32_t x) {
    bin[r] = max(bin_of(x), x == kAbsentKey ? uint32_t{kBins} : 0u);
    atomicAdd(&bins.fine[bin[r]], 1u);
  });
  __syncthreads();
  const BinHit hit = locate(bins, k);
  uint32_t rank = k - hit.above;
  if (hit.count > kSnapLimit) {
    uint32_t bottom = 0xffffffffu, top = 0;
    own.for_each([&](int r, uint32_t x) {
      if (bin[r] != hit.bin) return;
      bottom = min(bottom, x);
      top = max(top, x);
    });
    return split_bin(block, candidates, count, rank, bottom, top);
  }
  // The list takes the bin's members, and the candidates that rounding has put between the members and the
  // computed edge.
  const uint32_t edge =
      usable ? order_key(__fadd_rn(low, __fdiv_rn(static_cast<float>(hit.bin), scale))) : kZeroKey;
  uint32_t nearby = 0;  // mask of this thread's candidates that are listed
  own.for_each([&](int r, uint32_t x) {
    const uint32_t lowest = x > edge ? 0 : hit.bin;
    const uint32_t others = x > edge ? hit.bin : kBins - 1 - hit.bin;
    if (bin[r] - lowest <= others) nearby |= 1u << r;
  });
#pragma unroll 1
  for (; nearby != 0; nearby &= nearby - 1) {
    add_member(bins, candidates.key[own.first + 32 * (__ffs(nearby) - 1)]);
  }
  __syncthreads();
  const int listed = static_cast<int>(bins.members);
  if (listed > kSnapLimit) return walk(block, candidates, count, k, Snap{edge, 0});
  const uint32_t mine = bins.member[block.lane];
  ptx::reconverge(ptx::unknown_zero());
  rank += __popc(__ballot_sync(0xffffffffu, block.lane < listed && bin_of(mine) > hit.bin));
  return walk_list(mine, listed, rank, edge, 0, block.lane);
}

// Writes the selected positions in ascending order, and returns how many there are. Of the elements equal to
// the k-th, the first ones are selected, or none if ties are dropped.
__device__ __forceinline__ int partition(Block& block, const ThreadCandidates& own,
                                         const Candidates& candidates, int k, uint32_t kth, bool drops_ties,
                                         OutputWriter output) {
  constexpr uint32_t kLow = 0xffffu;
  uint32_t counts = 0;  // elements above the k-th key; from bit 16 on, elements equal to it
  own.for_each([&](int, uint32_t x) {
    counts += x > kth;
    if (x == kth) counts += kLow + 1;
  });
  block.store_partial<Reduce::kAdd>(0, counts);
  block.sync();
  const uint32_t earlier = block.reduce_earlier(0);
  const uint32_t all = block.reduce<Reduce::kAdd>(0);
  const int items = drops_ties ? static_cast<int>(all & kLow) : k;
  fallback::OutputCursor cursor{0, items - (all & kLow)};
  cursor.advance(earlier & kLow, earlier >> 16);
  // Otherwise the compiler would recompute the addresses of the rows for every element.
  ptx::keep(output.indices);
  ptx::keep(output.state_indices);
#pragma unroll 1
  for (int i = own.first; i - block.lane < own.limit; i += 32) {
    const bool there = i < own.limit;
    cursor.emit(there ? candidates.key[i] : kAbsentKey, candidates.position[there ? i : 0], kth, block.lane,
                output);
  }
  return items;
}

}  // namespace gvr_topk::paper_gvr
