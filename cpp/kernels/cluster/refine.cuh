// Phase 4, refine: the exact k-th key out of the listed ones. Every CTA does the same on its own copy.
#pragma once

#include "cluster/exchange.cuh"
#include "cluster/state.cuh"
#include "common/histogram.cuh"
#include "common/rank.cuh"

namespace gvr_topk::cluster {

// This thread's part of the keys listed in the cluster: the block is split evenly over the segments, and keys
// stay in registers. Scores bunch, so that some segments may have more keys than that: then the block is split
// evenly over all keys, in groups of a warp.
class Listed {
 public:
  template <typename T>
  __device__ __forceinline__ Listed(const Task<T>& task, const Verdict& verdict)
      : list_(task.list), warp_(task.warp), lane_(task.lane), cta_(task.team_target()), bunched_(verdict.bunched) {
    const auto listed_by = [&](int sender) {
      const uint32_t listed = task.shared->header[sender].counts.listed;
      return static_cast<int>(min(listed, static_cast<uint32_t>(task.list.segment())));
    };
    if (bunched_) {
      listed_ = task.lane < task.ctas ? listed_by(task.lane & (task.ctas - 1)) : 0;
      groups_ = (listed_ + 31) >> 5;
      ends_ = static_cast<int>(inclusive_scan(groups_));
      return;
    }
    const int count = listed_by(cta_) - task.team_place(), stride = task.team_size();
    const uint32_t* const keys = task.list.of(cta_) + task.team_place();
#pragma unroll
    for (int j = 0; j < kListedInRegisters; ++j) {
      held_[j] = j * stride < count ? keys[j * stride] : kAbsentKey;
    }
    few_ = __all_sync(0xffffffffu, 2 * stride >= count);
  }

  // Calls visit(key, CTA that listed it), where the key may be absent. A warp's calls are of one CTA's keys.
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    if (bunched_) {
      for_each_group(visit);
      return;
    }
    static_assert(kListedInRegisters == 4);
    visit(held_[0], cta_);  // the first half without asking, as it hardly ever is empty
    visit(held_[1], cta_);
    if (few_) return;
    visit(held_[2], cta_);
    visit(held_[3], cta_);
  }

 private:
  template <typename Visit>
  __device__ __forceinline__ void for_each_group(Visit visit) const {
    constexpr int kAtOnce = 4;  // so that their loads overlap
    const int all = __shfl_sync(0xffffffffu, ends_, 31);
#pragma unroll 1
    for (int first = warp_; first < all; first += kAtOnce * kWarps) {
      uint32_t key[kAtOnce];
      int sender[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int group = first + j * kWarps;
        sender[j] = __popc(__ballot_sync(0xffffffffu, ends_ <= group)) & 31;
        const int i = 32 * (group - __shfl_sync(0xffffffffu, ends_ - groups_, sender[j])) + lane_;
        const bool there = group < all && i < __shfl_sync(0xffffffffu, listed_, sender[j]);
        key[j] = there ? list_.of(sender[j])[i] : kAbsentKey;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * kWarps < all) visit(key[j], sender[j]);
      }
    }
  }

  const KeyList& list_;
  int warp_, lane_;
  int cta_;       // whose segment the thread's share of the block has
  bool bunched_;  // registers do not hold all keys
  bool few_;      // half of them do
  uint32_t held_[kListedInRegisters];
  int listed_, groups_, ends_;  // keys of this lane's CTA, their groups, and where those end among all
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
      listed.for_each([&](uint32_t x, int) {
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
    listed.for_each([&](uint32_t x, int) {
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
