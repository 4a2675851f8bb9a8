// Sizes of the kernel for slices of rows of prefill, and the layout of one CTA's shared memory. A store of
// listed elements follows the `SliceShared` struct.
#pragma once

#include "core/chunked_store.cuh"
#include "core/part_stream.cuh"
#include "core/prefill_rows.cuh"
#include "prefill/config.cuh"

namespace gvr_topk::prefill_slice {

using prefill::kBlockThreads;
using prefill::kBlockWarps;
using prefill::kKeyBins;
using prefill::kLog2KeyBins;
using prefill::kWindowsAhead;
using prefill::RowStream;

// Warps stream consecutive parts of a slice, so that their lists one behind the other are in index order. The
// elements that are listed cluster in few of the parts, so warps own little of the store at the start.
using SliceStore = ChunkedStore<BufferedValue, kBlockWarps, 16>;

// A row's part of a slice, and how its carry begins. One thread reads these numbers from the caller's tensors
// (`Window`).
struct Slice {
  Window window;     // columns of the slice
  int32_t shift;     // position of the first of them in the row's whole window
  int32_t carried;   // pairs of the carry, at most k
  uint32_t kth_key;  // the least of k pairs' keys; kAbsentKey if there are fewer
};

struct alignas(128) SliceShared {
  alignas(128) unsigned char ring[kBlockWarps * prefill::kPrefillRingDepth * kTileElements * sizeof(float)];
  alignas(16) uint32_t key_bins[kKeyBins];
  uint8_t chunks[kBlockWarps][kMaxBufferChunks];
  Slice slices[kWindowsAhead + 1];
  Schedule schedule;
  uint32_t above_range;
  BinHit hits[2];
  uint32_t warp_sums[2][kBlockWarps];
  uint32_t stored[kBlockWarps];      // listed elements of each warp
  uint32_t few_keys[kRankDirectly];  // keys that are ranked by comparison
  uint32_t few_count;                // keys added to `few_keys`
  uint32_t chunks_used;
  uint32_t is_full;  // whether an element found no room in the store
};

extern __shared__ __align__(128) unsigned char storage[];

// Functions that are not inlined get the memory from here, so that the compiler knows its address.
GVR_DEVICE SliceShared& shared_memory() { return *reinterpret_cast<SliceShared*>(storage); }

// The store of this warp's listed elements.
GVR_DEVICE SliceStore store_of_warp(SliceShared& smem, int list_chunks, int warp) {
  return SliceStore(reinterpret_cast<BufferedValue*>(&smem + 1), smem.chunks[warp], list_chunks, warp);
}

static_assert(sizeof(SliceShared) <= kSliceFixedBytes && kMaxSliceChunks <= kMaxBufferChunks);
static_assert(kSliceChunkBytes == kChunkBytes);

inline size_t shared_bytes(int list_chunks) { return sizeof(SliceShared) + kChunkBytes * list_chunks; }

}  // namespace gvr_topk::prefill_slice
