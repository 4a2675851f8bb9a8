// Final places of selected elements: how many are selected before an element, in index order.
#pragma once

#include "cluster/refine.cuh"
#include "cluster/state.cuh"

namespace gvr_topk::cluster {

// Counts are packed in pairs: elements above the cut, or all of those selected when no tie is left out, in
// the lower half, ties in the upper. A CTA lists and collects fewer than 2^16.
__device__ __forceinline__ uint32_t packed_count(uint32_t key, const Cut& cut) {
  if (key < cut.key) return 0;
  return key > cut.key || cut.takes_all() ? 1 : 1 << 16;
}

// The same for an element of the row. `level` is the cut's key as a value.
__device__ __forceinline__ uint32_t packed_count(float value, float level, const Cut& cut) {
  if (value < level) return 0;
  return cut.takes_all() || value != level ? 1 : 1 << 16;
}

// Counts the listed keys of every CTA in `segment_above`; to be read behind a block barrier.
template <typename T>
__device__ __forceinline__ void count_listed(const Task<T>& task, const Listed& listed, const Cut& cut) {
  uint32_t counts = 0;
  listed.for_each([&](uint32_t x) { counts += packed_count(x, cut); });
  counts = __reduce_add_sync(0xffffffffu, counts);
  // A warp never straddles two segments: there are at most as many CTAs as warps.
  if (task.lane == 0 && counts != 0) atomicAdd(&task.shared->segment_above[task.team_target()], counts);
}

// Where a lane's next selected element goes.
struct Place {
  int next;
  uint32_t ties_left;  // that may still be taken, from this lane's first element on

  // `in_warp`: packed count of the earlier lanes. Every warp has left its own in `warp_value[0]`, and
  // earlier CTAs' counts come out of their headers and lists. Ties go to the smallest indices.
  template <typename T>
  __device__ __forceinline__ Place(const Task<T>& task, const Bracket& bracket, const Cut& cut,
                                   uint32_t in_warp) {
    const Shared& sm = *task.shared;
    const uint32_t packed = earlier_warps(task, 0) + in_warp;
    uint32_t above = 0, ties = 0;
    if (task.lane < task.rank) {
      const Header& header = sm.header[task.lane];
      const uint32_t listed = sm.segment_above[task.lane];
      // The plateau's elements are not listed.
      const uint32_t plateau = bracket.plateau();
      const uint32_t on_plateau = plateau == kAbsentKey ? 0 : packed_count(plateau, cut);
      above = header.above + (listed & 0xffffu) + (on_plateau == 1 ? header.equal : 0);
      ties = (listed >> 16) + (on_plateau > 1 ? header.equal : 0);
    }
    above = __reduce_add_sync(0xffffffffu, above) + (packed & 0xffffu);
    ties = min(__reduce_add_sync(0xffffffffu, ties) + (packed >> 16), cut.quota);
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
