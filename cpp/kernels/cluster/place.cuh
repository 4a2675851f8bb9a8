// Final places of selected elements: how many are selected before an element, in index order.
#pragma once

#include "cluster/refine.cuh"
#include "cluster/state.cuh"

namespace gvr_topk::cluster {

// Counts are packed in pairs: elements above the cut, or all of those selected when no tie is left out, in
// the lower half, ties in the upper. What a cluster lists and one CTA holds or keeps are together fewer than
// 2^16 (`fits`).
__device__ __forceinline__ uint32_t packed_count(uint32_t key, const Cut& cut) {
  if (key < cut.key) return 0;
  return key > cut.key || cut.takes_all() ? 1 : 1 << 16;
}

// The same for an element of the row. `level` is the cut's key as a value.
__device__ __forceinline__ uint32_t packed_count(float value, float level, const Cut& cut) {
  if (value < level) return 0;
  return cut.takes_all() || value != level ? 1 : 1 << 16;
}

// Counts what is selected of the keys that earlier CTAs have listed; to be read behind a block barrier.
template <typename T>
__device__ __forceinline__ void count_listed(const Task<T>& task, const Listed& listed, const Cut& cut) {
  uint32_t counts = 0;
  // A warp never straddles two segments: there are at most as many CTAs as warps.
  if (listed.cta < task.rank) {
    listed.for_each([&](uint32_t x) { counts += packed_count(x, cut); });
  }
  counts = __reduce_add_sync(0xffffffffu, counts);
  if (task.lane == 0) task.shared->selected[0][task.warp] = counts;
}

// Where a lane's next selected element goes.
struct Place {
  int next;
  uint32_t ties_left;  // that may still be taken, from this lane's first element on

  // `above`: elements above the bracket in earlier CTAs. `in_warp`: packed count of the earlier lanes. What
  // earlier CTAs and warps select besides, they have left in `selected`. Ties go to the smallest indices.
  template <typename T>
  __device__ __forceinline__ Place(const Task<T>& task, const Bracket& bracket, const Cut& cut,
                                   uint32_t above, uint32_t in_warp) {
    const Shared& sm = *task.shared;
    // One half of the warp adds up what is selected in earlier CTAs, the other what is in earlier warps.
    static_assert(kWarps == 16);
    const uint32_t* selected = sm.selected[0];
    const uint32_t packed =
        __reduce_add_sync(0xffffffffu, task.lane < kWarps + task.warp ? selected[task.lane] : 0) + in_warp;
    above += packed & 0xffffu;
    uint32_t ties = packed >> 16;
    const uint32_t plateau = bracket.plateau();
    if (plateau != kAbsentKey) {  // its elements are not listed
      const uint32_t equal =
          __reduce_add_sync(0xffffffffu, task.lane < task.rank ? sm.header[task.lane].counts.equal : 0);
      const uint32_t on_plateau = packed_count(plateau, cut);
      above += on_plateau == 1 ? equal : 0;
      ties += on_plateau > 1 ? equal : 0;
    }
    ties = min(ties, cut.quota);
    ties_left = cut.quota - ties;
    next = static_cast<int>(cut.takes_all() ? above : above + ties);
  }

  // Whether the next element is selected; a tie, only while the quota lasts.
  __device__ __forceinline__ bool take(bool tie) {
    if (!tie) return true;
    if (ties_left == 0) return false;
    --ties_left;
    return true;
  }
};

}  // namespace gvr_topk::cluster
