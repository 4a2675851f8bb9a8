// Streams rows through shared memory. Each warp streams its own pairs of tiles of a row, and fetches its
// first pairs of the next row before the CTA selects from this row.
#pragma once

#include "prefill/config.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::prefill {

// A row's pairs of tiles go to the warps of the CTA in turn: large scores cluster, and this spreads them.
constexpr int kPairStride = kBlockWarps * kPairElements;

GVR_DEVICE int pairs_of_warp(int length, int warp) {
  const int left = length - warp * kPairElements;
  return left > 0 ? (left + kPairStride - 1) / kPairStride : 0;
}

// Whether candidates of a row are collected: it is longer than k, its bitmap fits, and k is not too large.
template <typename T>
GVR_DEVICE bool has_candidates(const PrefillParams& p, const Window& row, const AlignedWindow<T>& window) {
  return p.lists && row.row >= 0 && row.n > p.k && window.length <= p.bitmap_pairs * kPairElements;
}

template <typename T>
struct ChunkStream {
  using Ring = TileRing<T, kPrefillRingDepth>;
  static constexpr int kDepth = kPrefillRingDepth / 2;  // pairs that are being fetched at once

  Ring ring;
  const T* from;              // where this lane fetches the next pair
  int left = 0;               // elements of the row from that pair on
  int in_flight = 0;          // pairs that were requested and are not used yet
  uint32_t fetch_slot = 0;    // where the next pair goes
  uint32_t slot = 0;          // where the oldest pair lies
  bool has_next_row = false;  // whether the pairs being fetched are the next row's

  GVR_DEVICE ChunkStream(const void* storage, int warp, int lane)
      : ring(storage, warp, lane), from(nullptr) {}

  GVR_DEVICE void begin(const AlignedWindow<T>& window, int warp, int lane) {
    from = window.data + warp * kPairElements + lane * kPerVec<T>;
    left = window.length - warp * kPairElements;
  }

  // The slot of the pair that comes behind `slot`.
  GVR_DEVICE static uint32_t next(uint32_t slot) { return Ring::next(slot + Ring::kTileBytes); }

  // Fetches the next pair, if there is one.
  GVR_DEVICE void fetch() {
    if (left <= 0) return;
    ring.fetch(from, left, fetch_slot);
    ring.fetch(from + kTileElements, left - kTileElements, fetch_slot + Ring::kTileBytes);
    ptx::commit_copies();
    fetch_slot = next(fetch_slot);
    from += kPairStride;
    left -= kPairStride;
    ++in_flight;
  }

  // Fetches pairs while there is room for them.
  GVR_DEVICE void fill() {
#pragma unroll 1
    while (left > 0 && in_flight < kDepth) fetch();
  }

  // Starts to stream a row, unless its first pairs are in flight already.
  GVR_DEVICE void enter(const AlignedWindow<T>& window, int warp, int lane) {
    if (!has_next_row) begin(window, warp, lane);
    has_next_row = false;
    fill();
  }

  // Drops the fetched pairs, so that a row can be streamed from its beginning.
  GVR_DEVICE void restart() {
    ptx::wait_copies<0>();
    __syncwarp();
    in_flight = 0;
    fetch_slot = slot = 0;
    has_next_row = false;
  }

  // Calls visit(slot) for each of this warp's pairs, and fetches the first pairs of the next row if that row
  // will be streamed. All lanes take part.
  template <typename Visit>
  GVR_DEVICE void for_each_pair(const PrefillParams& p, int pairs, const Window& next_window, int warp,
                                int lane, Visit visit) {
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      if (in_flight == kDepth) {
        ptx::wait_copies<kDepth - 1>();
      } else {
        ptx::wait_copies<0>();
      }
      __syncwarp();
      visit(slot);
      ptx::reconverge(ptx::unknown_zero());  // All lanes have read the slot.
      slot = next(slot);
      --in_flight;
      if (left <= 0 && !has_next_row) begin_next_row(p, next_window, warp, lane);
      fetch();
    }
    if (left <= 0 && !has_next_row) begin_next_row(p, next_window, warp, lane);
    fill();
  }

 private:
  GVR_DEVICE void begin_next_row(const PrefillParams& p, const Window& next_window, int warp, int lane) {
    const Window window = next_window;
    const AlignedWindow<T> aligned(p, window);
    if (!has_candidates(p, window, aligned)) return;
    begin(aligned, warp, lane);
    has_next_row = true;
  }
};

}  // namespace gvr_topk::prefill
