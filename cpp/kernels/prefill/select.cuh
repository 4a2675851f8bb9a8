// Phases 2 to 5 of a row whose interval holds the k-th value: verify, refine, and emit what was collected.
#pragma once

#include "core/lane_ranks.cuh"
#include "prefill/guess.cuh"
#include "prefill/output.cuh"

namespace gvr_topk::prefill {

// Where the k-th element stands among the listed ones.
struct ListCount {
  uint32_t rank;    // from the top
  uint32_t listed;  // elements inside the interval
  bool complete;    // The k-th is listed, and everything that may be selected was kept.
};

// What all warps have kept, behind a block barrier.
__device__ __forceinline__ ListCount count_kept(const Shared& sm, int k, int lane) {
  const uint32_t kept = __reduce_add_sync(0xffffffffu, lane < kWarps ? sm.kept[lane] : 0);
  ListCount result{k - (kept - sm.listed), sm.listed, false};
  // A rank below one, as an unsigned number, exceeds every count.
  result.complete = sm.is_full == 0 && result.listed <= kMaxListed && result.rank - 1 < result.listed;
  return result;
}

// The bin of the rank-th listed element from the top. Each warp finds it for itself.
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
  // The bins add up to the listed elements, so that one lane finds its rank.
  const int owner = max(__ffs(__ballot_sync(0xffffffffu, here)) - 1, 0);
  hit.bin = __shfl_sync(0xffffffffu, hit.bin, owner);
  hit.above = __shfl_sync(0xffffffffu, hit.above, owner);
  hit.count = __shfl_sync(0xffffffffu, hit.count, owner);
  return hit;
}

// Takes a listed element out of what its warp has kept.
__device__ __forceinline__ void drop(Shared& sm, StorePlace place) {
  sm.positions[place.item()] = -1;
  atomicAdd(&sm.dropped[place.warp()], 1u);
}

// Elements in the order of selection: greater values first, and smaller positions among equal ones.
__device__ __forceinline__ uint64_t ordered(uint32_t key, int position) {
  return uint64_t{key} << 32 | static_cast<uint32_t>(~position);
}

// Drops all but the `rank` first of the listed elements that lie in a crowded bin, as many ties do: rounds of
// finer and finer bins find the last one that stays.
template <typename InBin>
__device__ __noinline__ void drop_from_crowd(Shared& sm, uint32_t listed, uint32_t rank, InBin in_bin) {
  const int lane = threadIdx.x & 31;
  const auto for_each = [&](auto visit) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < listed; i += kThreads) {
      const uint32_t key = sm.listed_keys[i];
      const StorePlace place = sm.listed_places[i];
      if (in_bin(key)) visit(ordered(key, sm.positions[place.item()]), place);
    }
  };
  if (threadIdx.x == 0) {
    sm.crowd_begin = UINT64_MAX;
    sm.crowd_end = 0;
  }
  __syncthreads();
  for_each([&](uint64_t x, StorePlace) {
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
    for_each([&](uint64_t x, StorePlace) {
      if (x - begin <= length) atomicAdd(&sm.fine_bins[(x - begin) >> shift], 1u);
    });
    __syncthreads();
    const BinHit hit = locate_fine(sm, rank, lane);
    rank -= hit.above;
    begin += uint64_t{hit.bin} << shift;
    if (shift == 0 || rank == hit.count) break;
    length = (uint64_t{1} << shift) - 1;
    __syncthreads();  // All warps have read the bins.
  }
  for_each([&](uint64_t x, StorePlace place) {
    if (x < begin) drop(sm, place);
  });
}

// Refines: drops the listed elements that are not selected. Returns a value close to the k-th. Everything
// that is kept is selected behind the next block barrier.
__device__ __forceinline__ float refine(Shared& sm, const ValueInterval& interval, const ListCount& counted,
                                        int lane, int warp) {
  const float bins_per_unit = interval.bins_per_unit();
  const BinHit hit = locate_fine(sm, counted.rank, lane);
  const uint32_t rank = counted.rank - hit.above;
  const bool takes_all = rank == hit.count, few = hit.count <= kRankDirectly;
  const auto bin_of = [&](uint32_t key) { return interval.bin(key_to_float(key), bins_per_unit); };
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < counted.listed; i += kThreads) {
    const uint32_t key = sm.listed_keys[i];
    const int bin = bin_of(key);
    if (bin > static_cast<int>(hit.bin) || (bin == static_cast<int>(hit.bin) && takes_all)) continue;
    const StorePlace place = sm.listed_places[i];
    if (bin < static_cast<int>(hit.bin)) {
      drop(sm, place);
    } else if (few) {
      const uint32_t slot = atomicAdd(&sm.boundary_count, 1u) % kRankDirectly;
      sm.boundary[slot] = ordered(key, sm.positions[place.item()]);
      sm.boundary_places[slot] = place;
    }
  }
  if (!takes_all) {
    __syncthreads();
    if (!few) {
      drop_from_crowd(sm, counted.listed, rank,
                      [&](uint32_t key) { return bin_of(key) == static_cast<int>(hit.bin); });
    } else if (warp == 0) {
      const bool there = lane < static_cast<int>(hit.count);
      const uint64_t mine = there ? sm.boundary[lane] : 0;
      float greater = 0.0f;
#pragma unroll 1
      for (int i = 0; i < static_cast<int>(hit.count); ++i) {
        ptx::count_if_greater(greater, __shfl_sync(0xffffffffu, mine, i), mine);
      }
      if (there && greater >= static_cast<float>(rank)) drop(sm, sm.boundary_places[lane]);
    }
  }
  return interval.value_of(hit.bin);
}

// Writes the positions that this warp has kept, in ascending order.
template <typename Put>
__device__ __forceinline__ void emit_kept(const Shared& sm, const PositionStore& store, int lane, int warp,
                                          Put put) {
  const uint32_t earlier = lane < warp ? sm.kept[lane] - sm.dropped[lane] : 0;
  int item = static_cast<int>(__reduce_add_sync(0xffffffffu, earlier));
  const uint32_t lower = (1u << lane) - 1;
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int first = lane; first < store.count + lane; first += 32 * kAtOnce) {
    int position[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      position[j] = first + 32 * j < store.count ? store.at(first + 32 * j) : -1;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t there = __ballot_sync(0xffffffffu, position[j] >= 0);
      if (position[j] >= 0) put(item + __popc(there & lower), position[j]);
      item += __popc(there);
    }
  }
}

__device__ __forceinline__ void emit(const Shared& sm, const PositionStore& store, int lead,
                                     const PrefillOutput& output, int lane, int warp) {
  if (output.is_plain()) {
    emit_kept(sm, store, lane, warp, [&](int item, int at) { output.put_plain(item, at - lead); });
  } else {
    emit_kept(sm, store, lane, warp, [&](int item, int at) { output.put(item, at - lead); });
  }
}

}  // namespace gvr_topk::prefill
