// Sizes of the prefill kernel, and the shared memory of one CTA.
#pragma once

#include "core/chunked_store.cuh"
#include "core/histogram.cuh"
#include "core/tile_ring.cuh"
#include "prefill/predictor.cuh"
#include "prefill/window.cuh"

namespace gvr_topk::prefill {

// Small blocks, several of which share an SM: while one of them selects, the others stream.
constexpr int kThreads = kPrefillThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kRingDepth = 2;  // tiles per warp that are being fetched at once

constexpr int kStoreChunks = 160;                   // of candidates
constexpr int kStoreItems = kStoreChunks * kChunk;  // so many: k, and a wide interval besides
static_assert(kStoreItems >= kPrefillMaxK + 3072 && kStoreChunks <= kMaxBufferChunks);
static_assert(kFineBins == kThreads && kFineBins == 8 * 32);
constexpr int kLog2KeyBins = 11;
constexpr int kKeyBins = 1 << kLog2KeyBins;  // of a range of keys
static_assert(kKeyBins == 8 * kThreads);

using CandidateStore = ChunkedStore<BufferedValue, kWarps>;

// A candidate in the bin of the k-th value, and the warp that has stored it.
struct BoundaryItem {
  uint64_t order;  // greater ones are selected first
  int32_t warp;
};

// Windows are published two rows ahead of the row that is selected from.
constexpr int kWindowsAhead = 2;

struct alignas(128) Shared {
  alignas(128) unsigned char ring[kWarps * kRingDepth * kTileElements * sizeof(float)];
  union {
    BufferedValue candidates[kStoreItems];
    struct {  // A histogram of keys belongs to a sample, or to a radix round: then there are no candidates.
      uint32_t key_bins[kKeyBins];
      uint32_t above_range;
    };
  };
  alignas(16) uint32_t fine_bins[kFineBins];  // of the candidates
  uint8_t chunks[kWarps][kStoreChunks];
  alignas(16) BoundaryItem boundary[kRankDirectly];
  Window windows[kWindowsAhead + 1];
  Schedule schedule;
  BinHit hits[2];
  RowPredictor predictor;     // one thread writes it, for the next row
  RowReport report;           // of one thread
  uint32_t stored[kWarps];    // candidates of each warp
  uint32_t selected[kWarps];  // those of them that are selected for certain
  uint32_t warp_sums[2][kWarps];
  uint64_t crowd_begin, crowd_end;  // first and last in order of the candidates in a crowded bin
  uint32_t chunks_used;
  uint32_t boundary_count;
  uint32_t is_full;  // whether the store had no room
};

extern __shared__ __align__(128) unsigned char storage[];

}  // namespace gvr_topk::prefill
