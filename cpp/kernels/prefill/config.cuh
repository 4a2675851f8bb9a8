// Sizes of the prefill kernel, and the shared memory of one CTA. Behind it lies a bitmap of the row's
// elements.
#pragma once

#include "core/chunked_store.cuh"
#include "core/histogram.cuh"
#include "core/tile_ring.cuh"
#include "prefill/predictor.cuh"
#include "prefill/window.cuh"

namespace gvr_topk::prefill {

// Small blocks, of which two share an SM: while one of them selects, the other streams.
constexpr int kThreads = kPrefillThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kRingDepth = 4;  // tiles per warp that are being fetched at once

constexpr int kStoreChunks = 88;  // of candidates, which lie inside the interval
constexpr int kStoreItems = kStoreChunks * kChunk;
static_assert(kStoreChunks <= kMaxBufferChunks && kStoreItems >= kPrefillMaxK);
static_assert(kFineBins == kThreads && kFineBins == 8 * 32);
constexpr int kLog2KeyBins = 11;
constexpr int kKeyBins = 1 << kLog2KeyBins;  // of a range of keys
static_assert(kKeyBins == 8 * kThreads);

using CandidateStore = ChunkedStore<BufferedValue, kWarps>;

// Windows are published two rows ahead of the row that is selected from.
constexpr int kWindowsAhead = 2;

struct alignas(128) Shared {
  alignas(128) unsigned char ring[kWarps * kRingDepth * kTileElements * sizeof(float)];
  union {
    BufferedValue candidates[kStoreItems];
    int32_t staged[kPrefillMaxK];  // positions in ascending order, when the candidates have been looked at
    struct {  // A histogram of keys belongs to a sample, or to a radix round: then there are no candidates.
      uint32_t key_bins[kKeyBins];
      uint32_t above_range;
    };
  };
  alignas(16) uint32_t fine_bins[kFineBins];  // of the candidates
  uint8_t chunks[kWarps][kStoreChunks];
  alignas(16) uint64_t boundary[kRankDirectly];
  Window windows[kWindowsAhead + 1];
  Schedule schedule;
  BinHit hits[2];
  RowPredictor predictor;   // one thread writes it, for the next row
  RowReport report;         // of one thread
  uint32_t stored[kWarps];  // candidates of each warp
  uint32_t above[kWarps];   // elements above the interval in the tiles of each warp
  uint32_t warp_sums[2][kWarps];
  uint64_t crowd_begin, crowd_end;  // first and last in order of the candidates in a crowded bin
  uint32_t chunks_used;
  uint32_t boundary_count;
  uint32_t is_full;  // whether the store had no room
};

extern __shared__ __align__(128) unsigned char storage[];

// One half-word for each lane of a tile: its elements that are selected.
__device__ __forceinline__ uint16_t* bitmap_of(Shared& sm) { return reinterpret_cast<uint16_t*>(&sm + 1); }

constexpr size_t kBitmapBytesOfTile = 32 * sizeof(uint16_t);

static_assert(sizeof(Shared) <= kPrefillFixedBytes && kTileElements == kPrefillTileElements);

inline size_t shared_bytes(int bitmap_tiles) { return sizeof(Shared) + kBitmapBytesOfTile * bitmap_tiles; }

}  // namespace gvr_topk::prefill
