// Storage for the items that one CTA keeps of a row while the row streams by. Each warp's items stay in the
// order in which they came. They lie in chunks of a store that all warps of the CTA share.
#pragma once

#include <cstdint>

#include "core/config.cuh"
#include "core/lane_ranks.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk {

// Large scores cluster, and warps own consecutive parts of a row, so warps need different amounts of room.
// One part in `kOwnShare` of the store is therefore divided evenly among the block's `kBlockWarps` warps at
// the start. The rest is handed out chunk by chunk to the warps that need more.
template <typename Item, int kBlockWarps, int kOwnShare = 2>
struct ChunkedStore {
  Item* store;
  uint8_t* chunks;  // numbers of this warp's chunks, in order
  int capacity;     // chunks in the store
  int room;         // items for which this warp's chunks have room
  int shift;        // Item i lies at shift + i if it lies in the chunks that were taken last.
  int count = 0;
  bool full = false;

  GVR_DEVICE static constexpr int initial_chunks(int capacity) {
    return capacity / (kOwnShare * kBlockWarps);
  }

  GVR_DEVICE ChunkedStore(Item* storage, uint8_t* table, int size, int warp)
      : store(storage),
        chunks(table),
        capacity(size),
        room(kChunk * initial_chunks(size)),
        shift(warp * room) {}

  // Records the chunks that this warp has from the start. It must run before anything is appended. The
  // counter of used chunks already includes these chunks.
  GVR_DEVICE void claim_part(int lane) const {
    if (lane < initial_chunks(capacity)) chunks[lane] = static_cast<uint8_t>((shift >> kLog2Chunk) + lane);
  }

  GVR_DEVICE Item& at(int i) const { return store[chunks[i >> kLog2Chunk] * kChunk + (i & (kChunk - 1))]; }

  // Calls visit(item) for this lane's part of the warp's items, which are visited 32 at a time in their
  // order. All lanes take part, and those without an item get `padding`. The items before number `rotation`
  // come last.
  template <typename Visit>
  GVR_DEVICE void for_each(int lane, int rotation, const Item& padding, Visit visit) const {
    constexpr int kAtOnce = 4;  // Several at once, so that their loads overlap.
#pragma unroll 1
    for (int first = 0; first < count; first += 32 * kAtOnce) {
      Item some[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + 32 * j + lane, rotated = min(i, count - 1) + rotation;
        const Item item = at(rotated < count ? rotated : rotated - count);
        some[j] = i < count ? item : padding;
      }
      ptx::reconverge(ptx::unknown_zero());  // ptxas may make a branch of the choice.
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + 32 * j < count) visit(some[j]);
      }
    }
  }

  // Takes consecutive chunks for `added` more items. All lanes take part. Returns false when the store is
  // full.
  GVR_DEVICE bool claim_chunks(uint32_t* used, int added, int lane) {
    const int owned = room >> kLog2Chunk;
    const int more = (count + added - room + kChunk - 1) >>
                     kLog2Chunk;  // At most two tiles' elements: no more chunks than lanes.
    int first = 0;
    if (lane == 0) first = static_cast<int>(atomicAdd(used, static_cast<uint32_t>(more)));
    ptx::reconverge(ptx::unknown_zero());
    first = __shfl_sync(0xffffffffu, first, 0);
    full |= first + more > capacity;
    if (full) return false;
    if (lane < more) chunks[owned + lane] = static_cast<uint8_t>(first + lane);
    shift = kChunk * first - room;
    room += kChunk * more;
    return true;
  }

  // Appends the selected elements of a warp, lane by lane. put(index, at) stores the lane's element number
  // `index` as item `at` of the store. All lanes take part. If the store has no chunks left for the elements,
  // nothing is appended.
  template <typename Put>
  GVR_DEVICE void append(uint32_t* used, uint32_t selected, int lane, Put put) {
    const LaneRank rank = rank_lanes(selected, lane);
    if (rank.all == 0) return;
    const int old_shift = shift, old_room = room;
    if (count + rank.all > room && !claim_chunks(used, rank.all, lane)) return;
    int next = count + rank.before;
    count += rank.all;
#pragma unroll 1
    for (; selected != 0; selected &= selected - 1) {
      put(__ffs(selected) - 1, (next < old_room ? old_shift : shift) + next);
      ++next;
    }
  }

  // The same for two sets of up to 16 elements of each lane. Those of the second, whose numbers start at 16,
  // come behind the first set of all lanes.
  template <typename Put>
  GVR_DEVICE void append_pair(uint32_t* used, uint32_t selected, uint32_t second, int lane, Put put) {
    const LaneRank rank = rank_lanes(selected, lane), rank_of_second = rank_lanes(second, lane);
    const int added = rank.all + rank_of_second.all;
    if (added == 0) return;
    const int old_shift = shift, old_room = room;
    if (count + added > room && !claim_chunks(used, added, lane)) return;
    int next = count + rank.before, left = __popc(selected);
    const int then = count + rank.all + rank_of_second.before;
    count += added;
#pragma unroll 1
    for (uint32_t both = selected | second << 16; both != 0; both &= both - 1) {
      if (left-- == 0) next = then;
      put(__ffs(static_cast<int>(both)) - 1, (next < old_room ? old_shift : shift) + next);
      ++next;
    }
  }
};

}  // namespace gvr_topk
