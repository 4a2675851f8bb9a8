// Streams rows through shared memory. Each warp streams its own tiles of a row, and fetches its first tiles
// of the next row before the CTA selects from this row.
#pragma once

#include "prefill/config.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::prefill {

// A row's tiles go to the warps of the CTA in turn: large scores cluster, and this spreads them.
constexpr int kTileStride = kBlockWarps * kTileElements;

GVR_DEVICE int tiles_of_warp(int length, int warp) {
  const int left = length - warp * kTileElements;
  return left > 0 ? (left + kTileStride - 1) / kTileStride : 0;
}

// Whether the row's candidates are collected: its bitmap fits, and k is not too large.
template <typename T>
GVR_DEVICE bool has_room(const PrefillParams& p, const AlignedWindow<T>& window) {
  return p.lists && window.length <= p.bitmap_tiles * kTileElements;
}

template <typename T>
struct ChunkStream {
  TileRing<T, kPrefillRingDepth> ring;
  const T* from;              // where this lane fetches the next tile
  int left = 0;               // elements of the row from that tile on
  int in_flight = 0;          // tiles that were requested and are not used yet
  uint32_t fetch_slot = 0;    // where the next tile goes
  uint32_t slot = 0;          // where the oldest tile lies
  bool has_next_row = false;  // whether the tiles being fetched are the next row's

  GVR_DEVICE ChunkStream(const void* storage, int warp, int lane)
      : ring(storage, warp, lane), from(nullptr) {}

  GVR_DEVICE void begin(const AlignedWindow<T>& window, int warp, int lane) {
    from = window.data + warp * kTileElements + lane * kPerVec<T>;
    left = window.length - warp * kTileElements;
  }

  // Fetches the next tile, if there is one.
  GVR_DEVICE void fetch() {
    if (left <= 0) return;
    ring.fetch(from, left, fetch_slot);
    ptx::commit_copies();
    fetch_slot = TileRing<T, kPrefillRingDepth>::next(fetch_slot);
    from += kTileStride;
    left -= kTileStride;
    ++in_flight;
  }

  // Fetches tiles while there is room for them.
  GVR_DEVICE void fill() {
#pragma unroll 1
    while (left > 0 && in_flight < kPrefillRingDepth) fetch();
  }

  // Starts to stream a row, unless its first tiles are in flight already.
  GVR_DEVICE void enter(const AlignedWindow<T>& window, int warp, int lane) {
    if (!has_next_row) begin(window, warp, lane);
    has_next_row = false;
    fill();
  }

  // Drops the fetched tiles, so that a row can be streamed from its beginning.
  GVR_DEVICE void restart() {
    ptx::wait_copies<0>();
    __syncwarp();
    in_flight = 0;
    fetch_slot = slot = 0;
    has_next_row = false;
  }

  // Calls visit(slot) for each of this warp's tiles, and fetches the first tiles of the next row if that row
  // will be streamed. All lanes take part.
  template <typename Visit>
  GVR_DEVICE void for_each_tile(const PrefillParams& p, int tiles, const Window& next_window, int warp,
                                int lane, Visit visit) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      if (in_flight == kPrefillRingDepth) {
        ptx::wait_copies<kPrefillRingDepth - 1>();
      } else {
        ptx::wait_copies<0>();
      }
      __syncwarp();
      visit(slot);
      ptx::reconverge(ptx::unknown_zero());  // All lanes have read the slot.
      slot = TileRing<T, kPrefillRingDepth>::next(slot);
      --in_flight;
      if (left <= 0 && !has_next_row) begin_next_row(p, next_window, warp, lane);
      fetch();
    }
    if (left <= 0 && !has_next_row) {
      begin_next_row(p, next_window, warp, lane);
    }
    fill();
  }

 private:
  GVR_DEVICE void begin_next_row(const PrefillParams& p, const Window& next_window, int warp, int lane) {
    const Window window = next_window;
    if (window.row < 0 || window.n <= p.k) return;
    const AlignedWindow<T> aligned(p, window);
    if (!has_room(p, aligned)) return;
    begin(aligned, warp, lane);
    has_next_row = true;
  }
};

}  // namespace gvr_topk::prefill
