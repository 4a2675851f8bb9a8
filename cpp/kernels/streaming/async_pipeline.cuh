// A warp's part of a long row on its way through shared memory: asynchronous copies run a few tiles ahead of
// the filter.
#pragma once

#include "core/row_context.cuh"
#include "ptx/compare.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "streaming/candidate_buffer.cuh"

namespace gvr_topk::streaming {

// Fetches the last tile of a part, with -inf behind its end. `target`: shared address of the first of this
// lane's vectors; the others follow in steps of a group. `left`: elements from `from` on. This is out of line
// because most tiles are whole.
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
      // Memory behind the end of the buffer must not be read.
#pragma unroll 1
      for (int e = 0; e < there; ++e) {
        ptx::store_shared(vec + e * sizeof(T), from[j * Tile<T>::kGroup + e]);
      }
    }
  }
}

// A ring of tiles, of 16 consecutive elements per lane, which are fetched in coalesced order. The vectors of
// a lane are swizzled, by an exclusive or with their addresses, so that 16-byte reads of neighbouring lanes
// fall into different banks.
template <typename T>
struct AsyncPipeline {
  static constexpr int kVecs = Tile<T>::kVecs;
  static constexpr int kLaneBytes = kVecs * sizeof(uint4);
  static constexpr uint32_t kTileBytes = 32 * kLaneBytes;
  static constexpr uint32_t kBytes = kRingDepth * kTileBytes;  // of one warp
  static_assert(alignof(Shared) % kLaneBytes == 0, "addresses of a lane differ in their last bits only");

  const T* data;  // where this lane fetches in the warp's part
  int length;     // elements of the part
  int tiles;
  // The tile that a warp starts with; it comes to those before it last. Warps that walked in step through
  // parts a power of two apart would crowd the same memory channels.
  int first;
  uint32_t write_address;  // of the first vector that this lane fetches, in slot 0
  uint32_t read_address;   // of this lane's own first vector, before swizzling, in slot 0
  // A row longer than L2 would evict everything else, starting with this kernel's own instructions.
  uint64_t policy = ptx::evict_first_policy();

  __device__ __forceinline__ AsyncPipeline(const T* tile, int elements, int warp, int lane,
                                           const void* storage)
      : data(tile + lane * kPerVec<T>),
        length(elements),
        tiles((elements + kTileElements - 1) / kTileElements),
        first(warp * tiles / kWarps) {
    const uint32_t pipeline = ptx::shared_address(storage) + warp * kBytes;
    const int owner = lane / kVecs;
    // The owners of a lane's other vectors are 8 lanes apart (16, if there are two vectors), and swizzle
    // alike.
    write_address = pipeline + owner * kLaneBytes + (lane % kVecs * sizeof(uint4) ^ swizzle(owner));
    read_address = pipeline + lane * kLaneBytes + swizzle(lane);
    ptx::keep(write_address);
    ptx::keep(read_address);
  }

  __device__ __forceinline__ static uint32_t swizzle(int owner) {
    return (owner * kVecs >> 3 & (kVecs - 1)) * sizeof(uint4);
  }

  // Starts to fetch a tile into the slot at byte offset `slot`. The warp's part has `left` elements from
  // `from` on.
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

  // Bits of this lane's elements, in the tile at `slot`, that are not below `lo`, which is finite. NaN is not
  // below.
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

  __device__ __forceinline__ float value(uint32_t slot, int index) const {
    return to_float(ptx::load_shared_element<T>(read_address + slot ^ index * sizeof(T)));
  }
};

// Fetches the tiles of a warp's part in turn.
template <typename T>
struct TileProducer {
  const T* from;
  int left;        // elements of the part from `from` on
  int tiles_left;  // tiles still to be fetched

  __device__ __forceinline__ explicit TileProducer(const AsyncPipeline<T>& pipeline)
      : from(pipeline.data + pipeline.first * kTileElements),
        left(pipeline.length - pipeline.first * kTileElements),
        tiles_left(pipeline.tiles) {}

  __device__ __forceinline__ void fetch(const AsyncPipeline<T>& pipeline, uint32_t slot) {
    if (tiles_left > 0) pipeline.fetch(from, left, slot);
    ptx::commit_copies();  // Empty groups count too, when groups are waited for.
    --tiles_left;
    from += kTileElements;
    left -= kTileElements;
    if (left <= 0) {
      from = pipeline.data;
      left = pipeline.length;
    }
  }
};

// Streams this warp's part, whose first tiles are under way, and buffers what is not below `lo`.
template <typename T>
__device__ __forceinline__ void filter_row(const RowContext<T>& ctx, const AsyncPipeline<T>& pipeline,
                                           TileProducer<T>& producer, float lo, CandidateBuffer& buffer) {
  // The position of this lane's first element in the tile.
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
                  [&](int index) { return BufferedValue{position + index, pipeline.value(slot, index)}; });
    __syncwarp();  // All lanes have read the slot.
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
