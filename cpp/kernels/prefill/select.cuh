// The phases of a row that touch its candidates: verify, refine and emit.
#pragma once

#include "core/lane_ranks.cuh"
#include "prefill/guess.cuh"
#include "prefill/output.cuh"

namespace gvr_topk::prefill {

// Calls visit(candidate) for this lane's part of a warp's candidates, 32 of the warp at a time, in index
// order. All lanes take part; where there is no candidate, its position is negative.
template <typename Visit>
__device__ __forceinline__ void for_each_candidate(const CandidateStore& store, int lane, Visit visit) {
  constexpr int kAtOnce = 4;  // Several, so that their loads overlap.
#pragma unroll 1
  for (int first = lane; first < store.count + lane; first += 32 * kAtOnce) {
    BufferedValue some[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + 32 * j;
      some[j] = i < store.count ? store.at(i) : BufferedValue{-1, -INFINITY};
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first - lane + 32 * j < store.count) visit(some[j]);
    }
  }
}

// Counts this warp's candidates into the bins. NaN falls into the last bin, with all that lies above.
__device__ __forceinline__ void count_candidates(Shared& sm, const CandidateStore& store,
                                                 const ValueInterval& interval, float bins_per_unit,
                                                 int lane) {
  for_each_candidate(store, lane, [&](const BufferedValue& x) {
    if (x.position >= 0) atomicAdd(&sm.fine_bins[interval.bin(x.value, bins_per_unit)], 1u);
  });
}

// The bin of the rank-th candidate from the top. Each warp finds it for itself.
__device__ __forceinline__ BinHit locate_fine(const Shared& sm, uint32_t rank, int lane) {
  const uint4 low = reinterpret_cast<const uint4*>(sm.fine_bins)[2 * lane];
  const uint4 high = reinterpret_cast<const uint4*>(sm.fine_bins)[2 * lane + 1];
  const uint32_t bin[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += bin[i];
  const uint32_t upto = ptx::suffix_sum(sum);
  BinHit hit{8u * lane, upto - sum, 0};
  const bool here = hit.above < rank && rank <= upto;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    if (hit.count == 0) {
      if (rank <= hit.above + bin[i]) {
        hit.bin += i;
        hit.count = bin[i];
      } else {
        hit.above += bin[i];
      }
    }
  }
  // There are at least so many candidates, so that one lane finds the rank.
  const int owner = max(__ffs(__ballot_sync(0xffffffffu, here)) - 1, 0);
  hit.bin = __shfl_sync(0xffffffffu, hit.bin, owner);
  hit.above = __shfl_sync(0xffffffffu, hit.above, owner);
  hit.count = __shfl_sync(0xffffffffu, hit.count, owner);
  return hit;
}

// Elements in the order of selection: greater values first, and smaller positions among equal ones.
__device__ __forceinline__ uint64_t order_of(const BufferedValue& x) {
  return uint64_t{order_key(x.value)} << 32 | static_cast<uint32_t>(~x.position);
}

// The last element that is selected.
struct LastSelected {
  uint64_t order;

  __device__ __forceinline__ uint32_t key() const { return static_cast<uint32_t>(order >> 32); }
  __device__ __forceinline__ float value() const { return key_to_float(key()); }
  __device__ __forceinline__ int position() const { return ~static_cast<int>(order); }
};

// The `rank`-th in order of the candidates in a crowded bin, where many ties are. Rounds of finer and finer
// bins find it. The counts of selected candidates are complete behind the next block barrier.
template <typename InBin>
__device__ __noinline__ uint64_t rank_in_crowd(Shared& sm, const CandidateStore store, uint32_t rank,
                                               InBin in_bin) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const auto for_each = [&](auto visit) {
    for_each_candidate(store, lane, [&](const BufferedValue& x) {
      if (x.position >= 0 && in_bin(x.value)) visit(order_of(x));
    });
  };
  if (threadIdx.x == 0) {
    sm.crowd_begin = UINT64_MAX;
    sm.crowd_end = 0;
  }
  __syncthreads();
  for_each([&](uint64_t x) {
    atomicMin(reinterpret_cast<unsigned long long*>(&sm.crowd_begin), x);
    atomicMax(reinterpret_cast<unsigned long long*>(&sm.crowd_end), x);
  });
  __syncthreads();
  uint64_t begin = sm.crowd_begin, length = sm.crowd_end - sm.crowd_begin;
  // Every round takes 8 bits off the length. No two elements are the same, so that the last bin has one.
#pragma unroll 1
  while (true) {
    const int shift = max(0, 64 - kLog2FineBins - __clzll(static_cast<long long>(length)));
    sm.fine_bins[threadIdx.x] = 0;
    __syncthreads();
    for_each([&](uint64_t x) {
      if (x - begin <= length) atomicAdd(&sm.fine_bins[(x - begin) >> shift], 1u);
    });
    __syncthreads();
    const BinHit hit = locate_fine(sm, rank, lane);
    rank -= hit.above;
    begin += uint64_t{hit.bin} << shift;
    if (shift == 0) break;
    length = (uint64_t{1} << shift) - 1;
    __syncthreads();  // All warps have read the bins.
  }
  uint32_t mine = 0;
  for_each([&](uint64_t x) { mine += x >= begin; });
  mine = __reduce_add_sync(0xffffffffu, mine);
  if (lane == 0) sm.selected[warp] += mine;
  return begin;
}

// Where a warp's results go, and what it selects.
struct Selection {
  LastSelected last;
  int first_item;
};

// Refines: finds the last element that is selected, among the candidates in the bin of the k-th.
__device__ __forceinline__ Selection refine(Shared& sm, const CandidateStore& store,
                                            const ValueInterval& interval, float bins_per_unit,
                                            const BinHit& hit, uint32_t rank, int lane, int warp) {
  const bool few = hit.count <= kRankDirectly;
  const auto bin_of = [&](float x) { return static_cast<uint32_t>(interval.bin(x, bins_per_unit)); };
  uint32_t above = 0;
  for_each_candidate(store, lane, [&](const BufferedValue& x) {
    if (x.position < 0) return;
    const uint32_t bin = bin_of(x.value);
    above += bin > hit.bin;
    if (bin != hit.bin || !few) return;
    const uint32_t slot = atomicAdd(&sm.boundary_count, 1u) % kRankDirectly;
    sm.boundary[slot] = BoundaryItem{order_of(x), warp};
  });
  above = __reduce_add_sync(0xffffffffu, above);
  if (lane == 0) sm.selected[warp] = above;
  __syncthreads();
  uint64_t last = 0;
  uint32_t earlier = 0;
  if (few) {
    const bool there = lane < static_cast<int>(hit.count);
    const BoundaryItem mine = there ? sm.boundary[lane] : BoundaryItem{0, kWarps};
    float greater = 0.0f;
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(hit.count); ++i) {
      ptx::count_if_greater(greater, __shfl_sync(0xffffffffu, mine.order, i), mine.order);
    }
    const uint32_t selected = __ballot_sync(0xffffffffu, there && greater < static_cast<float>(rank));
    const uint32_t is_last = __ballot_sync(0xffffffffu, there && greater == static_cast<float>(rank - 1));
    last = __shfl_sync(0xffffffffu, mine.order, max(__ffs(is_last) - 1, 0));
    earlier = __popc(selected & __ballot_sync(0xffffffffu, mine.warp < warp));
  } else {
    last = rank_in_crowd(sm, store, rank, [&](float x) { return bin_of(x) == hit.bin; });
    __syncthreads();
  }
  earlier += __reduce_add_sync(0xffffffffu, lane < warp ? sm.selected[lane] : 0);
  return Selection{LastSelected{last}, static_cast<int>(earlier)};
}

// Writes the positions of this warp's selected candidates, in ascending order.
template <typename Put>
__device__ __forceinline__ void emit_selected(const CandidateStore& store, const Selection& selection,
                                              int lane, Put put) {
  const float value = selection.last.value();
  const int position = selection.last.position();
  const uint32_t lower = (1u << lane) - 1;
  int item = selection.first_item;
  for_each_candidate(store, lane, [&](const BufferedValue& x) {
    // NaN is not at or below anything.
    const bool is_selected = !(x.value <= value) || (x.value == value && x.position <= position);
    const uint32_t selected = __ballot_sync(0xffffffffu, is_selected && x.position >= 0);
    if (is_selected && x.position >= 0) put(item + __popc(selected & lower), x.position);
    item += __popc(selected);
  });
}

__device__ __forceinline__ void emit(const CandidateStore& store, const Selection& selection, int lead,
                                     const PrefillOutput& output, int lane) {
  if (output.is_plain()) {
    emit_selected(store, selection, lane, [&](int item, int at) { output.put_plain(item, at - lead); });
  } else {
    emit_selected(store, selection, lane, [&](int item, int at) { output.put(item, at - lead); });
  }
}

}  // namespace gvr_topk::prefill
