// Writes the results of a row: positions for the caller, and for the next step.
//
// Claims decide, in launches of many rows, which row leaves its positions in a slot that several rows may
// name.
//
// A claim is the number of a row, as a negative number other than -1, in place of the first position that the
// slot keeps. A launch before that of the rows writes the greatest claim to each slot (claims/launch.cu). The
// row whose claim it is writes all positions of the slot, the first one included; every other row then finds
// either another claim or a position.
#pragma once

#include <cstdint>

#include "core/launch_traits.cuh"
#include "gvr_topk/params.h"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

constexpr int32_t kNoClaim = INT32_MIN;  // less than every claim

GVR_DEVICE int32_t claim_of(int row) { return kNoClaim + 1 + row; }

GVR_DEVICE int32_t* claim_at(const TopkParams& p, int slot) {
  return p.state_indices + slot * p.state_indices_stride;
}

// Writes the results of one row. It writes only the row's own k items, whatever item number is passed. Item
// numbers come from counts, and the counts of CTAs that read a row while it was overwritten do not fit
// together.
struct OutputWriter {
  int32_t* indices;
  int32_t* state_indices;  // null: the next step gets no positions
  const int32_t* pages;    // null: positions are not translated to cache slots
  int32_t* cache_slots;    // null: cache slots take the place of positions in `indices`
  int k;
  int page_size;
  int pages_per_request;
  bool writes_state;  // whether this row has a slot and writes the state of its request

  // Keeps the pointers in registers, for kernels that write everything by `put`. Otherwise the compiler would
  // compute the pointers again for each element.
  GVR_DEVICE void keep(const LaunchTraits& traits) {
    ptx::keep(indices);
    if (traits.has(LaunchTraits::kWritesState)) ptx::keep(state_indices);
  }

  // Whether the row has `count` items from `first` on. Callers of `put_untranslated` must check this.
  GVR_DEVICE bool owns(int first, int count) const { return first >= 0 && count <= k - first; }

  // Writes a position as an item that the row is known to have. The call must have no page table.
  GVR_DEVICE void put_untranslated(int item, int position) const {
    ptx::store_global(indices + item, position);
    if (state_indices != nullptr) ptx::store_global(state_indices + item, position);
  }

  GVR_DEVICE void put(int item, int position) const { put(item, position, position); }

  // Writes a position that the caller of the library sees as another number, `shown`.
  GVR_DEVICE void put(int item, int position, int shown) const {
    if (static_cast<uint32_t>(item) >= static_cast<uint32_t>(k)) return;
    const bool apart = cache_slots != nullptr;
    const int cache_slot = pages != nullptr ? translated(position) : shown;
    ptx::store_global(indices + item, apart ? shown : cache_slot);
    if (apart) ptx::store_global(cache_slots + item, cache_slot);
    if (state_indices != nullptr) ptx::store_global(state_indices + item, position);
  }

 private:
  // Slot of a position in the paged cache; -1 for padding, for a page that the table does not hold, and for a
  // slot beyond 32 bits.
  GVR_DEVICE int translated(int position) const {
    const int page = position / page_size;
    if (position < 0 || page >= pages_per_request) return -1;
    const int64_t first = pages[page];  // Read once, because another stream may be writing it.
    const int64_t slot = first * page_size + position % page_size;
    return first >= 0 && slot <= INT32_MAX ? static_cast<int>(slot) : -1;
  }
};

// Whether the last row of a later request names this slot. `row` is the last row of its own request. The
// lanes of a warp share the search, and all of them take part, whatever they have read as the slot.
GVR_DEVICE bool is_named_later(const TopkParams& p, int next_n, int row, int slot) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  bool named = false;
#pragma unroll 4  // so that the loads overlap
  for (int first = row + next_n; first < p.rows; first += 32 * next_n) {
    // Lanes behind the last row look at it as well, so that all make as many rounds.
    named |= p.row_slot[min(first + next_n * lane, p.rows - 1)] == slot;
  }
  ptx::reconverge(ptx::unknown_zero());  // Lanes may have come here apart, from what each has sent.
  return __any_sync(0xffffffffu, named);
}

// `kOptions`: see RowJob. `owns_slot`: whether the row has the slot's claim, if slots are claimed.
template <bool kOptions>
GVR_DEVICE OutputWriter make_output_writer(const TopkParams& p, const LaunchTraits& traits, int next_n,
                                           int row, int request, int slot, bool owns_slot) {
  OutputWriter output;
  output.indices = p.indices + row * p.indices_stride;
  // The next step starts from the result of the request's last row.
  const bool last = row - request * next_n == next_n - 1;
  output.writes_state = last && slot >= 0 && !traits.has(LaunchTraits::kStateByRow);
  // If several rows wrote their positions to one slot, the result would be a mixture, because their CTAs
  // write at the same time.
  if (kOptions && traits.has(LaunchTraits::kSharedSlots) && last && is_named_later(p, next_n, row, slot)) {
    output.writes_state = false;
  }
  if (kOptions && traits.has(LaunchTraits::kClaimedSlots) && !owns_slot) output.writes_state = false;
  output.state_indices = output.writes_state && p.state_indices != nullptr
                             ? p.state_indices + slot * p.state_indices_stride
                             : nullptr;
  output.pages = p.page_table != nullptr ? p.page_table + request * p.page_table_stride : nullptr;
  output.cache_slots = p.slots != nullptr ? p.slots + row * p.slots_stride : nullptr;
  output.k = p.k;
  output.page_size = p.page_size;
  output.pages_per_request = p.pages_per_request;
  return output;
}

}  // namespace gvr_topk
