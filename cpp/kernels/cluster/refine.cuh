// Phase 4, refine: the exact k-th key out of the listed ones. Every CTA does the same on its own copy.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/state.cuh"
#include "common/histogram.cuh"
#include "common/rank.cuh"

namespace gvr_topk::cluster {

// This thread's part of the keys listed in the cluster: the block is split evenly over the segments. The
// first few stay in registers.
struct Listed {
  static constexpr int kHeld = 4;  // written out below
  uint32_t held[kHeld];
  const uint32_t* keys;  // from the first of this thread's on,
  int count;             // up to the last of the segment's
  int stride;
  int cta;  // whose segment it is

  template <typename T>
  __device__ __forceinline__ explicit Listed(const Task<T>& task)
      : keys(task.list.of(task.team_target()) + task.team_place()),
        count(static_cast<int>(min(task.shared->header[task.team_target()].counts.listed,
                                   static_cast<uint32_t>(task.list.segment()))) -
              task.team_place()),
        stride(task.team_size()),
        cta(task.team_target()) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) held[j] = j * stride < count ? keys[j * stride] : kAbsentKey;
  }

  // Calls visit(key), where the key may be absent.
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    visit(held[0]);  // the first half without asking, as it hardly ever is empty
    visit(held[1]);
    if (__all_sync(0xffffffffu, 2 * stride >= count)) return;
    visit(held[2]);
    visit(held[3]);
#pragma unroll 4
    for (int i = kHeld * stride; i < count; i += stride) visit(keys[i]);
  }
};

// Where the selection ends: every key above `key` is selected, and the first `quota` of the `equal` ones.
struct Cut {
  uint32_t key;
  uint32_t quota;
  uint32_t equal;

  __device__ __forceinline__ bool takes_all() const { return quota == equal; }
};

// Adds a key to the few that are ranked by comparison, as long as there is room.
__device__ __forceinline__ void add_small(Shared& sm, uint32_t key) {
  const uint32_t slot = atomicAdd(&sm.small_count, 1u);
  if (slot < kRankDirectly) sm.small[slot] = key;
}

// The cut at the rank-th largest of the first `count` keys in `small`.
__device__ __forceinline__ Cut cut_directly(const Shared& sm, uint32_t rank, int count, int lane) {
  const uint32_t mine = lane < count ? sm.small[lane] : kAbsentKey;
  const uint32_t key = rank_directly(mine, count, rank, lane);
  const uint32_t above = __popc(__ballot_sync(0xffffffffu, mine > key));
  return Cut{key, rank - above, static_cast<uint32_t>(__popc(__ballot_sync(0xffffffffu, mine == key)))};
}

// Cut at the verdict's rank-th largest inside the bracket. Histograms of 1024 bins narrow the key
// range by 10 bits a round, until all keys of a bin are wanted (then the bin's lower edge serves as the
// k-th key: no element lies between them) or few enough are left to rank them directly.
template <typename T>
__device__ __forceinline__ Cut kth_key(const Task<T>& task, const Bracket& bracket, const Listed& listed,
                                       const Verdict& verdict, int& rounds) {
  Shared& sm = *task.shared;
  constexpr int kIdle = kIdleBits<T>;
  const uint32_t plateau = bracket.plateau();
  // Of keys without their idle bits; above the absent key, whose distance wraps.
  uint32_t base = bracket.lo >> kIdle;
  if (whole_key<T>(base) < bracket.lo) ++base;  // nothing below the bracket
  uint32_t reach = (bracket.hi >> kIdle) - base;
  uint32_t rank = verdict.rank;
  uint32_t inside = verdict.inside;
  bool cleared = true;  // the histogram, and `small_count` 0, before the lists were made
#pragma unroll 1
  while (reach != 0 && rank != inside) {
    if (inside <= kRankDirectly) {
      listed.for_each([&](uint32_t x) {
        if ((x >> kIdle) - base <= reach) add_small(sm, x);
      });
      if (task.thread == 0 && plateau != kAbsentKey && (plateau >> kIdle) - base <= reach) {
        for (uint32_t i = 0; i < min(verdict.equal, uint32_t{kRankDirectly}); ++i) {
          add_small(sm, plateau);
        }
      }
      __syncthreads();
      return cut_directly(sm, rank, static_cast<int>(inside), task.lane);
    }
    const int shift = max(0, 32 - Histogram::kLog2Bins - __clz(reach));
    if (!cleared) {
      __syncthreads();  // all have located the last rank
      sm.keys.template clear<kThreads>();
      __syncthreads();
    }
    cleared = false;
    listed.for_each([&](uint32_t x) {
      const uint32_t distance = (x >> kIdle) - base;
      sm.keys.add(distance <= reach ? distance >> shift : Histogram::kBins);
    });
    if (task.thread == 0 && plateau != kAbsentKey && (plateau >> kIdle) - base <= reach) {
      sm.keys.add(((plateau >> kIdle) - base) >> shift, verdict.equal);
    }
    __syncthreads();
    ++rounds;
    const BinHit hit = sm.keys.locate(rank, task.thread);
    rank -= hit.above;
    inside = hit.count;
    const uint32_t offset = hit.bin << shift;
    base += offset;
    reach = min(reach - offset, (1u << shift) - 1);
    // Around zero keys lie far apart: rounds would go on where nothing but the plateau is left.
    if (plateau != kAbsentKey && inside == verdict.equal && (plateau >> kIdle) - base <= reach) {
      base = plateau >> kIdle;
      reach = 0;
    }
  }
  return Cut{whole_key<T>(base), rank, inside};
}

}  // namespace gvr_topk::cluster
