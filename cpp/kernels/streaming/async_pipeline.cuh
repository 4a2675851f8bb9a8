// Streams a warp's part of a long row through shared memory. Asynchronous copies run a few tiles ahead of the
// filter.
#pragma once

#include "core/row_context.cuh"
#include "core/tile_ring.cuh"
#include "ptx/registers.cuh"
#include "streaming/candidate_buffer.cuh"

namespace gvr_topk::streaming {

// A warp's part of the row, and the ring that its tiles pass through.
template <typename T>
struct AsyncPipeline : TileRing<T, kRingDepth> {
  static_assert(alignof(Shared) % TileRing<T, kRingDepth>::kLaneBytes == 0);

  const T* data;  // the first vector of the warp's part that this lane fetches
  int length;     // elements of the part
  int tiles;
  // The tile that the warp starts with; the tiles before it come last. Warps that walked in step through
  // parts a power of two apart would crowd the same memory channels.
  int first;

  __device__ __forceinline__ AsyncPipeline(const T* part, int elements, int warp, int lane,
                                           const void* storage)
      : TileRing<T, kRingDepth>(storage, warp, lane),
        data(part + lane * kPerVec<T>),
        length(elements),
        tiles((elements + kTileElements - 1) / kTileElements),
        first(warp * tiles / kWarps) {}
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

// Streams this warp's part, whose first tiles are under way, and buffers the elements that are not below
// `lo`.
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
    buffer.append(&ctx.shared->chunks_used, pipeline.not_below(lo, slot), ctx.lane, [&](int index, int at) {
      buffer.store[at] = BufferedValue{position + index, pipeline.value(slot, index)};
    });
    ptx::reconverge(ctx.zero);  // All lanes have read the slot.
    producer.fetch(pipeline, slot);
    slot = AsyncPipeline<T>::next(slot);
    position += kTileElements;
    if (position == end) {
      position -= pipeline.tiles * kTileElements;
      buffer.rotation = buffer.count;
    }
  }
  __syncwarp();
}

}  // namespace gvr_topk::streaming
