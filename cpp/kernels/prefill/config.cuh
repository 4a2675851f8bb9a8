// Sizes of the prefill kernel, what a row leaves for the next row of its run, and the layout of one CTA's
// shared memory. A bitmap with one bit for each element of the row follows the `Shared` struct.
#pragma once

#include "core/chunked_store.cuh"
#include "core/config.cuh"
#include "core/histogram.cuh"
#include "core/key.cuh"
#include "core/row_stats.cuh"
#include "core/tile_ring.cuh"
#include "core/window.cuh"
#include "ptx/math.cuh"

namespace gvr_topk::prefill {

constexpr int kLog2FineBins = 8;
constexpr int kFineBins = 1 << kLog2FineBins;  // bins of an interval, linear in the value

// An inclusive interval of finite values that should hold the k-th value. Even bins from `first` to `last`
// divide its elements, because `lo` and `hi` themselves may lie far out.
struct ValueInterval {
  float lo, hi, first, last;

  // The bin of a value. A greater value never lies in a lower bin, and NaN lies in the highest bin.
  __device__ __forceinline__ int bin(float x, float bins_per_unit) const {
    const float depth = __saturatef((last - x) * bins_per_unit);  // NaN becomes zero.
    return max(kFineBins - 1 - static_cast<int>(depth * kFineBins), 0);
  }

  __device__ __forceinline__ float bins_per_unit() const { return ptx::reciprocal(width()); }
  __device__ __forceinline__ float width() const { return last - first; }

  // The value in the middle of a bin.
  __device__ __forceinline__ float value_of(uint32_t bin) const {
    return fmaf((static_cast<float>(bin) + 0.5f) / kFineBins, width(), first);
  }
};

// The prediction for the next row: rows of one request that follow each other are alike.
struct RowPredictor {
  // Most elements that a predicted interval may hold. Where it would hold more, a sample of the row gives a
  // narrower interval, and the prediction is not used.
  static constexpr float kMaxInside = 1536.0f;
  static constexpr float kMinInside = 128.0f;
  static constexpr float kErrors = 5.0f;  // half-width of the interval, in mean errors
  static constexpr float kErrorDecay = 0.8f, kFastestDecay = 0.5f;
  // The error expected of a run's second row, in units of the width that sqrt(k) elements take up. The k-th
  // value moves about that far between rows whose elements are drawn anew.
  static constexpr float kFirstError = 1.1f;

  float value;        // the k-th value of the last row
  float error;        // how far the k-th value moves from row to row; negative: not known
  float per_element;  // interval width that held one element
  bool has_value;
  uint32_t tie_key;  // the last row's k-th key if its ties were too many for candidates; otherwise kAbsentKey

  __device__ __forceinline__ static RowPredictor unknown() {
    return RowPredictor{0.0f, -1.0f, 0.0f, false, kAbsentKey};
  }

  __device__ __forceinline__ bool is_close() const {
    return error >= 0.0f && 2.0f * kErrors * error <= kMaxInside * per_element;
  }

  __device__ __forceinline__ ValueInterval interval() const {
    const float radius = fmaxf(kErrors * error, 0.5f * kMinInside * per_element);
    // The lower end stays finite whatever the numbers are, so that -inf lies below the interval.
    const float lo = fmaxf(value - radius, key_to_float(kLeastFiniteKey)), hi = value + radius;
    return ValueInterval{lo, hi, lo, hi};
  }

  __device__ __forceinline__ void learn(float kth, float width_per_element, int k) {
    if (has_value) {
      const float move = fabsf(kth - value);
      error = fmaxf(kFastestDecay * error, fmaf(1.0f - kErrorDecay, move, kErrorDecay * error));
    } else {
      error = kFirstError * sqrtf(static_cast<float>(k)) * width_per_element;
    }
    value = kth;
    per_element = width_per_element;
    has_value = true;
    tie_key = kAbsentKey;
  }
};

// CTAs are small so that two share an SM: while one of them selects, the other streams.
constexpr int kThreads = kPrefillThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kRingDepth = 4;  // tiles per warp that are being fetched at once

constexpr int kStoreChunks = 88;  // chunks of the store of candidates, which lie inside the interval
constexpr int kStoreItems = kStoreChunks * kChunk;
static_assert(kStoreChunks <= kMaxBufferChunks && kStoreItems >= kPrefillMaxK);
static_assert(kFineBins == kThreads && kFineBins == 8 * 32);
constexpr int kLog2KeyBins = 11;
constexpr int kKeyBins = 1 << kLog2KeyBins;  // bins of a histogram over a range of keys
static_assert(kKeyBins == 8 * kThreads);

using CandidateStore = ChunkedStore<BufferedValue, kWarps>;

// Windows are published two rows ahead of the row being selected from.
constexpr int kWindowsAhead = 2;

struct alignas(128) Shared {
  alignas(128) unsigned char ring[kWarps * kRingDepth * kTileElements * sizeof(float)];
  union {
    BufferedValue candidates[kStoreItems];
    int32_t staged[kPrefillMaxK];  // selected positions, ascending, staged once the candidates are used up
    struct {  // A sample or a radix round uses a histogram of keys when there are no candidates.
      uint32_t key_bins[kKeyBins];
      uint32_t above_range;
    };
  };
  alignas(16) uint32_t fine_bins[kFineBins];  // histogram of the candidates' values
  uint8_t chunks[kWarps][kStoreChunks];
  alignas(16) uint64_t boundary[kRankDirectly];
  Window windows[kWindowsAhead + 1];
  Schedule schedule;
  BinHit hits[2];
  RowPredictor predictor;   // one thread writes it, for the next row
  RowReport report;         // only thread 0 reads and writes it
  uint32_t stored[kWarps];  // candidates of each warp
  uint32_t above[kWarps];   // elements above the interval in the tiles of each warp
  uint32_t warp_sums[2][kWarps];
  uint64_t crowd_begin, crowd_end;  // least and greatest `order_of` of the candidates in a crowded bin
  uint32_t chunks_used;
  uint32_t boundary_count;
  uint32_t is_full;  // whether a candidate found no room in the store
};

extern __shared__ __align__(128) unsigned char storage[];

// The bitmap of selected elements: one half-word for each lane of a tile, with one bit per element.
__device__ __forceinline__ uint16_t* bitmap_of(Shared& sm) { return reinterpret_cast<uint16_t*>(&sm + 1); }

constexpr size_t kBitmapBytesOfTile = 32 * sizeof(uint16_t);

static_assert(sizeof(Shared) <= kPrefillFixedBytes && kTileElements == kPrefillTileElements);

inline size_t shared_bytes(int bitmap_tiles) { return sizeof(Shared) + kBitmapBytesOfTile * bitmap_tiles; }

}  // namespace gvr_topk::prefill
