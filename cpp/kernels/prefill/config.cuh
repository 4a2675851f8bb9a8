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

constexpr int kStoreChunks = 160;                   // of positions that may be selected
constexpr int kStoreItems = kStoreChunks * kChunk;  // so many: k, and a wide interval besides
constexpr int kMaxListed = 3072;                    // elements inside the interval
static_assert(kStoreItems >= kPrefillMaxK + kMaxListed);
static_assert(kFineBins == kThreads && kFineBins == 8 * 32);
constexpr int kLog2KeyBins = 11;
constexpr int kKeyBins = 1 << kLog2KeyBins;  // of a range of keys
static_assert(kKeyBins == 8 * kThreads);

using PositionStore = ChunkedStore<int32_t, kWarps>;

// Where the position of a listed element is stored, and which warp has stored it.
struct StorePlace {
  uint16_t packed;

  static constexpr int kItemBits = 13;
  static_assert(kStoreItems <= 1 << kItemBits && kWarps <= 1 << (16 - kItemBits));

  StorePlace() = default;
  __device__ __forceinline__ StorePlace(int item, int warp)
      : packed(static_cast<uint16_t>(item | warp << kItemBits)) {}
  __device__ __forceinline__ int item() const { return packed & ((1 << kItemBits) - 1); }
  __device__ __forceinline__ int warp() const { return packed >> kItemBits; }
};

// Windows are published two rows ahead of the row that is selected from.
constexpr int kWindowsAhead = 2;

struct alignas(128) Shared {
  alignas(128) unsigned char ring[kWarps * kRingDepth * kTileElements * sizeof(float)];
  // A histogram of keys belongs to a sample, or to a radix round; elements are listed between those.
  union {
    struct {
      uint32_t key_bins[kKeyBins];
      uint32_t above_range;
    };
    uint32_t listed_keys[kMaxListed];
  };
  StorePlace listed_places[kMaxListed];
  alignas(16) uint32_t fine_bins[kFineBins];  // of the listed elements
  int32_t positions[kStoreItems];
  uint8_t chunks[kWarps][kStoreChunks];
  alignas(16) uint64_t boundary[kRankDirectly];  // listed elements in the bin of the k-th
  StorePlace boundary_places[kRankDirectly];
  Window windows[kWindowsAhead + 1];
  Schedule schedule;
  BinHit hits[2];
  RowPredictor predictor;    // one thread writes it, for the next row
  RowReport report;          // of one thread
  uint32_t kept[kWarps];     // positions that each warp has stored
  uint32_t dropped[kWarps];  // those of them that are not selected
  uint32_t warp_sums[2][kWarps];
  uint64_t crowd_begin, crowd_end;  // first and last of the elements in a crowded bin
  uint32_t chunks_used;
  uint32_t listed;
  uint32_t boundary_count;
  uint32_t is_full;  // whether the store had no room
};

extern __shared__ __align__(128) unsigned char storage[];

}  // namespace gvr_topk::prefill
