// A warp's part of a long row on its way through shared memory.
#pragma once

#include "core/row_context.cuh"
#include "ptx/compare.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "streaming/candidate_buffer.cuh"

namespace gvr_topk::streaming {

// The end of a row in a ring of shared memory: what is missing to a word is put in as -inf. `target`: where
// the first of this lane's vectors goes, the others in steps of a group; `left`: elements from there on. Out
// of line: most tiles are whole.
template <typename T>
__device__ __noinline__ void fetch_end(uint32_t target, const T* from, int left) {
#pragma unroll
  for (int j = 0; j < Tile<T>::kVecs; ++j) {
    const int there = left - j * Tile<T>::kGroup;
    const uint32_t vec = target + j * 32 * sizeof(uint4);
    if (there >= kPerVec<T>) {
      ptx::copy_async(vec, from + j * Tile<T>::kGroup);
    } else {
      ptx::store_shared(vec, absent_vec<T>());
      // There may be nothing behind the end to read.
#pragma unroll 1
      for (int e = 0; e < there; ++e) {
        ptx::store_shared(vec + e * sizeof(T), from[j * Tile<T>::kGroup + e]);
      }
    }
  }
}

// Words of 16 consecutive elements a lane, write_address in coalesced order. A lane's vectors are swapped
// about, by an exclusive or with their addresses, so that 16-byte reads of neighbouring lanes fall into
// different banks.
template <typename T>
struct AsyncPipeline {
  static constexpr int kVecs = Tile<T>::kVecs;
  static constexpr int kLaneBytes = kVecs * sizeof(uint4);
  static constexpr uint32_t kTileBytes = 32 * kLaneBytes;
  static constexpr uint32_t kBytes = kRingDepth * kTileBytes;  // of one warp
  static_assert(alignof(Shared) % kLaneBytes == 0, "addresses of a lane differ in their last bits only");

  const T* data;  // of the warp's part, for this lane
  int length;     // elements of the part
  int tiles;
  // The first word looked at; those before it come last. Warps that walked in step through parts a power of
  // two apart would crowd the same channels of the memory.
  int first;
  uint32_t write_address;  // where, in the first word, the first of the vectors that this lane fetches goes,
  uint32_t read_address;   // and, but for swapping, the first of those lies that it holds
  // A row longer than L2 would drive out all else, this kernel's own instructions first.
  uint64_t policy = ptx::evict_first_policy();

  __device__ __forceinline__ AsyncPipeline(const T* tile, int elements, int warp, int lane,
                                           const void* storage)
      : data(tile + lane * kPerVec<T>),
        length(elements),
        tiles((elements + kTileElements - 1) / kTileElements),
        first(warp * tiles / kWarps) {
    const uint32_t pipeline = ptx::shared_address(storage) + warp * kBytes;
    const int owner = lane / kVecs;
    // Owners of the further vectors are 8 apart (16, of two), and swap alike.
    write_address = pipeline + owner * kLaneBytes + (lane % kVecs * sizeof(uint4) ^ swap(owner));
    read_address = pipeline + lane * kLaneBytes + swap(lane);
    ptx::keep(write_address);
    ptx::keep(read_address);
  }

  __device__ __forceinline__ static uint32_t swap(int owner) {
    return (owner * kVecs >> 3 & (kVecs - 1)) * sizeof(uint4);
  }

  // Starts to fetch a word into `slot`, in bytes: `left` elements are left of the warp's part, from `from`
  // on.
  __device__ __forceinline__ void fetch(const T* from, int left, uint32_t slot) const {
    if (left >= kTileElements) {
#pragma unroll
      for (int j = 0; j < kVecs; ++j) {
        ptx::copy_async(write_address + slot + j * 32 * sizeof(uint4), from + j * Tile<T>::kGroup, policy);
      }
    } else {
      const int lane = threadIdx.x & 31;
      fetch_end(write_address + slot, from, left - lane * kPerVec<T>);
    }
  }

  // Marks of this lane's elements of the word in `slot` that are not below `lo`, which is finite.
  __device__ __forceinline__ uint32_t not_below(float lo, uint32_t slot) const {
    ptx::BitAccumulator bits;
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const uint4 vec = ptx::load_shared(read_address + slot ^ j * sizeof(uint4));
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) {
        ptx::set_bit_unless_less(bits.sums[j % 2], element<T>(vec, e), lo, 1u << (j * kPerVec<T> + e));
      }
    }
    return bits.bits();
  }

  __device__ __forceinline__ float value(uint32_t slot, int place) const {
    return to_float(ptx::load_shared_element<T>(read_address + slot ^ place * sizeof(T)));
  }
};

// Which word of a warp's part is write_address next.
template <typename T>
struct TileProducer {
  const T* from;
  int left;        // elements of the part from there on
  int tiles_left;  // tiles still to be write_address

  __device__ __forceinline__ explicit TileProducer(const AsyncPipeline<T>& pipeline)
      : from(pipeline.data + pipeline.first * kTileElements),
        left(pipeline.length - pipeline.first * kTileElements),
        tiles_left(pipeline.tiles) {}

  __device__ __forceinline__ void fetch(const AsyncPipeline<T>& pipeline, uint32_t slot) {
    if (tiles_left > 0) pipeline.fetch(from, left, slot);
    ptx::commit_copies();  // empty groups too: waiting counts groups
    --tiles_left;
    from += kTileElements;
    left -= kTileElements;
    if (left <= 0) {
      from = pipeline.data;
      left = pipeline.length;
    }
  }
};

// Streams this warp's part, of which the first tiles are under way, and keeps what is not below `lo`.
template <typename T>
__device__ __forceinline__ void filter_row(const RowContext<T>& ctx, const AsyncPipeline<T>& pipeline,
                                           TileProducer<T>& producer, float lo, CandidateBuffer& buffer) {
  // Of this lane's first element.
  int position = static_cast<int>(pipeline.data - ctx.row.data) + ctx.lane * (kValuesPerThread - kPerVec<T>);
  const int end = position + pipeline.tiles * kTileElements;
  position += pipeline.first * kTileElements;
  uint32_t slot = 0;
  ptx::keep(lo);
#pragma unroll 1
  for (int tile = 0; tile < pipeline.tiles; ++tile) {
    ptx::wait_copies<kRingDepth - 1>();
    __syncwarp();
    buffer.append(&ctx.shared->chunks_used, pipeline.not_below(lo, slot), ctx.lane,
                  [&](int place) { return BufferedValue{position + place, pipeline.value(slot, place)}; });
    __syncwarp();  // all have read the slot
    producer.fetch(pipeline, slot);
    slot = slot + AsyncPipeline<T>::kTileBytes == AsyncPipeline<T>::kBytes
               ? 0
               : slot + AsyncPipeline<T>::kTileBytes;
    position += kTileElements;
    if (position == end) {
      position -= pipeline.tiles * kTileElements;
      buffer.rotation = buffer.count;
    }
  }
  __syncwarp();
}

}  // namespace gvr_topk::streaming
