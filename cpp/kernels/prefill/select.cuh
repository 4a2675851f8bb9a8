// The phases that work on a row's candidates: verify, refine and emit.
#pragma once

#include "core/lane_ranks.cuh"
#include "prefill/guess.cuh"

namespace gvr_topk::prefill {

// Calls visit(candidate) for this thread's share of the candidates. All lanes take part.
template <typename Visit>
GVR_DEVICE void for_each_candidate(const PrefillShared& smem, uint32_t count, Visit visit) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kBlockThreads) visit(smem.candidates[i]);
  ptx::reconverge(ptx::unknown_zero());  // Some lanes have one candidate more.
}

// Counts the candidates into the bins. NaN falls into the last bin, like all values above the bins.
GVR_DEVICE void count_candidates(PrefillShared& smem, uint32_t count, const ValueInterval& interval,
                                 float bins_per_unit) {
  for_each_candidate(smem, count, [&](const BufferedValue& x) {
    atomicAdd(&smem.fine_bins[interval.bin(x.value, bins_per_unit)], 1u);
  });
}

// Finds the bin of the rank-th largest candidate. Each warp finds it for itself.
GVR_DEVICE BinHit locate_fine(const PrefillShared& smem, uint32_t rank, int lane) {
  const ThreadBins<kFineBins / 32> own(smem.fine_bins, lane);
  const BinHit hit = own.find(rank);
  // There are at least `rank` candidates, so one lane holds the rank.
  const int owner = max(__ffs(__ballot_sync(0xffffffffu, own.holds(rank))) - 1, 0);
  return BinHit{__shfl_sync(0xffffffffu, hit.bin, owner), __shfl_sync(0xffffffffu, hit.above, owner),
                __shfl_sync(0xffffffffu, hit.count, owner)};
}

// The order number of an element, which is greater for elements selected earlier: for greater values, and for
// smaller positions among equal values.
GVR_DEVICE uint64_t order_of(const BufferedValue& x) {
  return uint64_t{order_key(x.value)} << 32 | static_cast<uint32_t>(~x.position);
}

// Marks an element as selected.
GVR_DEVICE void mark(uint32_t* bitmap, int position) {
  atomicOr(&bitmap[position >> 5], 1u << (position & 31));
}

// Finds the order number of the `rank`-th candidate in a dense bin, which holds many ties, by rounds of
// finer and finer bins.
template <typename InBin>
GVR_DEVICE uint64_t rank_in_dense_bin(PrefillShared& smem, uint32_t count, int row_length, uint32_t rank,
                                      InBin in_bin) {
  const int lane = threadIdx.x & 31;
  const auto for_each = [&](auto visit) {
    for_each_candidate(smem, count, [&](const BufferedValue& x) {
      if (in_bin(x.value)) visit(order_of(x));
    });
  };
  if (threadIdx.x == 0) {
    smem.least_key = kMaxKey;
    smem.greatest_key = 0;
  }
  __syncthreads();
  uint32_t least = kMaxKey, greatest = 0;
  for_each([&](uint64_t x) {
    const uint32_t key = static_cast<uint32_t>(x >> 32);
    least = min(least, key);
    greatest = max(greatest, key);
  });
  least = __reduce_min_sync(0xffffffffu, least);
  greatest = __reduce_max_sync(0xffffffffu, greatest);
  if (lane == 0) {
    atomicMin(&smem.least_key, least);
    atomicMax(&smem.greatest_key, greatest);
  }
  ptx::reconverge(ptx::unknown_zero());
  __syncthreads();
  // Positions are less than `row_length`, so ties of one key take few rounds.
  uint64_t begin = uint64_t{smem.least_key} << 32 | ~static_cast<uint32_t>(row_length);
  uint64_t length = (uint64_t{smem.greatest_key} << 32 | UINT32_MAX) - begin;
  // Every round takes 8 bits off the length. Order numbers are distinct, so the last bin holds one.
#pragma unroll 1
  while (true) {
    const int shift = max(0, 64 - kLog2FineBins - __clzll(static_cast<long long>(length)));
    smem.fine_bins[threadIdx.x] = 0;
    __syncthreads();
    for_each([&](uint64_t x) {
      if (x - begin <= length) atomicAdd(&smem.fine_bins[(x - begin) >> shift], 1u);
    });
    __syncthreads();
    const BinHit hit = locate_fine(smem, rank, lane);
    rank -= hit.above;
    begin += uint64_t{hit.bin} << shift;
    if (shift == 0) break;
    length = (uint64_t{1} << shift) - 1;
    __syncthreads();  // All warps have read the bins.
  }
  return begin;
}

// Refines: marks the selected candidates: all above the bin of the k-th value and the first `rank` in that
// bin. The bitmap is complete after the next block barrier.
GVR_DEVICE void refine(PrefillShared& smem, uint32_t* bitmap, uint32_t count, int row_length,
                       const ValueInterval& interval, float bins_per_unit, const BinHit& hit, uint32_t rank,
                       int lane, int warp) {
  const auto bin_of = [&](float x) { return static_cast<uint32_t>(interval.bin(x, bins_per_unit)); };
  const bool takes_all = rank == hit.count, few = hit.count <= kRankDirectly;
  const uint32_t lowest = takes_all ? hit.bin : hit.bin + 1, zero = ptx::unknown_zero();
  for_each_candidate(smem, count, [&](const BufferedValue& x) {
    const uint32_t bin = bin_of(x.value);
    if (bin >= lowest) {
      mark(bitmap, x.position);
    } else if (bin == hit.bin && few) {
      smem.boundary[ptx::fetch_add_shared(smem.boundary_count, 1, zero) % kRankDirectly] = order_of(x);
    }
  });
  if (takes_all) return;
  __syncthreads();
  if (!few) {
    const uint64_t last =
        rank_in_dense_bin(smem, count, row_length, rank, [&](float x) { return bin_of(x) == hit.bin; });
    for_each_candidate(smem, count, [&](const BufferedValue& x) {
      if (bin_of(x.value) == hit.bin && order_of(x) >= last) mark(bitmap, x.position);
    });
  } else if (warp == 0) {
    const bool there = lane < static_cast<int>(hit.count);
    const uint64_t mine = there ? smem.boundary[lane] : 0;
    float greater = 0.0f;
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(hit.count); ++i) {
      ptx::count_if_greater(greater, __shfl_sync(0xffffffffu, mine, i), mine);
    }
    if (there && greater < static_cast<float>(rank)) mark(bitmap, ~static_cast<int>(mine));
  }
}

// Stages the marked positions in ascending order. This takes two block barriers.
GVR_DEVICE void stage(PrefillShared& smem, const uint32_t* bitmap, int length, int lead, int k, int lane,
                      int warp) {
  static_assert(kPairElements % 64 == 0, "whole words are written of every pair");
  const auto words_of = reinterpret_cast<const uint64_t*>(bitmap);
  const int words = (length + 63) / 64, part = (words + kBlockThreads - 1) / kBlockThreads * 32;
  const int begin = warp * part, end = min(begin + part, words);
  uint32_t count = 0;
#pragma unroll 4
  for (int i = begin + lane; i < end; i += 32) count += __popcll(words_of[i]);
  count = __reduce_add_sync(0xffffffffu, count);
  if (lane == 0) smem.warp_sums[0][warp] = count;
  __syncthreads();
  uint32_t item = __reduce_add_sync(0xffffffffu, lane < warp ? smem.warp_sums[0][lane] : 0);
  constexpr int kAtOnce = 4;  // words of a lane whose scans overlap
#pragma unroll 1
  for (int first = begin + lane; first - lane < end; first += 32 * kAtOnce) {
    uint64_t word[kAtOnce];
    uint32_t next[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      word[j] = first + 32 * j < end ? words_of[first + 32 * j] : 0;
      const uint32_t mine = __popcll(word[j]), upto = ptx::inclusive_scan(mine);
      next[j] = item + upto - mine;
      item += __shfl_sync(0xffffffffu, upto, 31);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int position = 64 * (first + 32 * j) - lead - 1;
#pragma unroll 1
      for (; word[j] != 0 && next[j] < static_cast<uint32_t>(k); word[j] &= word[j] - 1) {
        smem.staged[next[j]++] = position + __ffsll(static_cast<long long>(word[j]));
      }
    }
    ptx::reconverge(ptx::unknown_zero());
  }
  __syncthreads();
}

}  // namespace gvr_topk::prefill
