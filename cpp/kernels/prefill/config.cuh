// Sizes of the prefill kernel, and the layout of one CTA's shared memory. A bitmap with one bit for each
// element of the row follows the `PrefillShared` struct.
#pragma once

#include "core/config.cuh"
#include "core/histogram.cuh"
#include "core/prefill_rows.cuh"
#include "core/row_predictor.cuh"
#include "core/row_report.cuh"
#include "core/tile_ring.cuh"

namespace gvr_topk::prefill {

// CTAs are small so that two share an SM: while one of them selects, the other streams.
constexpr int kBlockThreads = kPrefillThreads;
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kPrefillRingDepth = 4;  // tiles per warp that are being fetched at once
// A warp takes two tiles at a time, which share the work that does not depend on their elements.
constexpr int kPairElements = 2 * kTileElements;
constexpr int kLog2FineBins = ValueInterval::kLog2Bins, kFineBins = ValueInterval::kBins;

constexpr uint32_t kListItems = 2816;  // candidates, which lie inside the interval
static_assert(kListItems >= kPrefillMaxK);
static_assert(kFineBins == kBlockThreads && kFineBins == 8 * 32);
constexpr int kLog2KeyBins = 11;
constexpr int kKeyBins = 1 << kLog2KeyBins;  // bins of a histogram over a range of keys
static_assert(kKeyBins == 8 * kBlockThreads);

// Windows are published two rows ahead of the row being selected from.
constexpr int kWindowsAhead = 2;

struct alignas(128) PrefillShared {
  alignas(128) unsigned char ring[kBlockWarps * kPrefillRingDepth * kTileElements * sizeof(float)];
  union {
    BufferedValue candidates[kListItems];
    int32_t staged[kPrefillMaxK];  // selected positions, ascending, staged once the candidates are used up
    struct {  // A sample or a radix round uses a histogram of keys when there are no candidates.
      uint32_t key_bins[kKeyBins];
      uint32_t above_range;
    };
  };
  alignas(16) uint32_t fine_bins[kFineBins];  // histogram of the candidates' values
  alignas(16) uint64_t boundary[kRankDirectly];
  Window windows[kWindowsAhead + 1];
  Schedule schedule;
  BinHit hits[2];
  RowPredictor predictor;  // one thread writes it, for the next row
  RowReport report;        // only thread 0 reads and writes it
  uint32_t warp_sums[2][kBlockWarps];
  uint32_t least_key, greatest_key;  // of the candidates in a dense bin
  uint32_t boundary_count;
  uint32_t above;   // elements above the interval
  uint32_t listed;  // candidates, of which the first kListItems are stored
};

extern __shared__ __align__(128) unsigned char storage[];

// The bitmap of selected elements: one half-word for each lane of a tile, with one bit per element.
GVR_DEVICE uint16_t* bitmap_of(PrefillShared& smem) { return reinterpret_cast<uint16_t*>(&smem + 1); }

constexpr size_t kBitmapBytesOfPair = kPairElements / 8;

static_assert(sizeof(PrefillShared) <= kPrefillFixedBytes && kPairElements == kPrefillPairElements);

inline size_t shared_bytes(int bitmap_pairs) {
  return sizeof(PrefillShared) + kBitmapBytesOfPair * bitmap_pairs;
}

}  // namespace gvr_topk::prefill
