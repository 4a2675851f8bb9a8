// Computes the offsets of selected elements in the output: the number of elements that are selected before
// each one, in index order.
#pragma once

#include "cluster/row_context.cuh"
#include "cluster/select.cuh"

namespace gvr_topk {

// Counts are packed in pairs. The lower half counts elements above the threshold, or all selected elements if
// no tie is left out. The upper half counts ties. Neither half overflows, because the keys that a cluster
// lists and the elements that one CTA holds are together fewer than 2^16 (`fits`). Masked rows have more ties
// than that, and do not pack those of earlier CTAs (resident/resolve_miss.cuh).
GVR_DEVICE uint32_t packed_count(uint32_t key, const Threshold& threshold) {
  if (key < threshold.key) return 0;
  return key > threshold.key || threshold.takes_all() ? 1 : 1 << 16;
}

// Returns the packed count of an element of the row. `level` is the threshold's key as a value.
GVR_DEVICE uint32_t packed_count(float value, float level, const Threshold& threshold) {
  if (value < level) return 0;
  return threshold.takes_all() || value != level ? 1 : 1 << 16;
}

// Counts the selected keys among those that earlier CTAs have listed. The counts are read behind a block
// barrier.
template <typename T>
GVR_DEVICE void count_listed(const RowContext<T>& ctx, const ListedKeys& listed, const Threshold& threshold) {
  uint32_t counts = 0;
  // A warp never straddles two segments, because there are at most as many CTAs as warps.
  if (listed.cta < ctx.rank) {
    listed.for_each([&](uint32_t x) { counts += packed_count(x, threshold); });
  }
  counts = __reduce_add_sync(0xffffffffu, counts);
  if (ctx.lane == 0) ctx.shared->selected[0][ctx.warp] = counts;
}

// The output index of a lane's next selected element, and the ties that may still be selected.
struct OutputOffset {
  int next;
  uint32_t ties_left;  // ties that may still be selected, from this lane's first element on

  // `above`: elements above the interval in earlier CTAs. `in_warp`: packed count of the earlier lanes. All
  // other counts of earlier CTAs and warps are in `selected`. Ties go to the smallest indices.
  template <typename T>
  GVR_DEVICE OutputOffset(const RowContext<T>& ctx, const KeyInterval& interval, const Threshold& threshold,
                          uint32_t above, uint32_t in_warp) {
    const Shared& smem = *ctx.shared;
    // One half of the warp adds up the counts of earlier CTAs, the other half those of earlier warps.
    static_assert(kWarps == 16);
    const uint32_t* selected = smem.selected[0];
    const uint32_t packed =
        __reduce_add_sync(0xffffffffu, ctx.lane < kWarps + ctx.warp ? selected[ctx.lane] : 0) + in_warp;
    above += packed & 0xffffu;
    uint32_t ties = packed >> 16;
    const uint32_t tie_key = interval.tie_key();
    if (tie_key != kAbsentKey) {  // Elements of the tie key are not listed.
      const uint32_t equal =
          __reduce_add_sync(0xffffffffu, ctx.lane < ctx.rank ? smem.header[ctx.lane].counts.equal : 0);
      const uint32_t at_tie_key = packed_count(tie_key, threshold);
      above += at_tie_key == 1 ? equal : 0;
      ties += at_tie_key > 1 ? equal : 0;
    }
    ties = min(ties, threshold.tie_quota);
    ties_left = threshold.tie_quota - ties;
    next = static_cast<int>(threshold.takes_all() ? above : above + ties);
  }

  // Whether the next element is selected: a tie is selected only while the quota lasts.
  GVR_DEVICE bool accept(bool tie) {
    if (!tie) return true;
    if (ties_left == 0) return false;
    --ties_left;
    return true;
  }
};

}  // namespace gvr_topk
