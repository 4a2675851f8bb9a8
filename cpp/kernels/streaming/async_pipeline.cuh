// Streams a warp's part of a long row through shared memory, and keeps its candidates with their values.
// Asynchronous copies run a few tiles ahead of the filter.
#pragma once

#include "cluster/row_context.cuh"
#include "cluster/smem_layout.cuh"
#include "core/chunked_store.cuh"
#include "core/key_range.cuh"
#include "core/launch_traits.cuh"
#include "core/tile_ring.cuh"
#include "ptx/warp.cuh"

namespace gvr_topk::streaming {

struct CandidateBuffer : ChunkedStore<BufferedValue, kWarps> {
  // The candidate that is first in index order: warps start mid-part, so earlier candidates follow the last.
  int rotation = 0;

  using ChunkedStore::ChunkedStore;

  // Whether `x` was buffered: padding is -inf, and -inf never is.
  GVR_DEVICE static bool is_buffered(const BufferedValue& x) { return x.value != -INFINITY; }

  // Turns every NaN into infinity and everything else into -inf, because NaN itself does not compare. All
  // lanes take part.
  GVR_DEVICE void keep_only_nan(int lane) const {
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      BufferedValue& x = at(i);
      x.value = x.value != x.value ? INFINITY : -INFINITY;
    }
    __syncwarp();
  }

  // Calls visit(candidate) for this lane's part of the candidates, in index order. All lanes take part; some
  // get -inf.
  template <typename Visit>
  GVR_DEVICE void for_each(int lane, Visit visit) const {
    ChunkedStore::for_each(lane, rotation, BufferedValue{0, -INFINITY}, visit);
  }
};

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

  GVR_DEVICE AsyncPipeline(const T* part, int elements, int warp, int lane, const void* storage)
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

  GVR_DEVICE explicit TileProducer(const AsyncPipeline<T>& pipeline)
      : from(pipeline.data + pipeline.first * kTileElements),
        left(pipeline.length - pipeline.first * kTileElements),
        tiles_left(pipeline.tiles) {}

  GVR_DEVICE void fetch(const AsyncPipeline<T>& pipeline, uint32_t slot) {
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
GVR_DEVICE void filter_row(const RowContext<T>& ctx, const AsyncPipeline<T>& pipeline,
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
    uint32_t bits = pipeline.not_below(lo, slot);
    if (ctx.row.lead != 0) bits &= ptx::bit_range(max(-position, 0), 32);
    if (position == end - kTileElements) {  // The last tile may reach behind the part's end.
      bits &= ptx::bit_range(
          0, max(pipeline.length - (pipeline.tiles - 1) * kTileElements - ctx.lane * kValuesPerThread, 0));
    }
    buffer.append(&ctx.shared->chunks_used, bits, ctx.lane, [&](int index, int at) {
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

// Returns whether ties of the tie key may be most of the row. They are not in a row that is masked nearly
// everywhere, nor in one of infinities, nor if they lie above a lower end that a sample gave, because few
// elements of the row lie there.
GVR_DEVICE bool may_be_dense(const KeyInterval& interval) {
  const bool is_sampled = interval.source == kGuessRowSample;
  return interval.tie_key() != kAbsentKey && interval.lo != kLeastFiniteKey && interval.lo != kPosInfKey &&
         !(is_sampled && interval.lo < interval.tie_key());
}

// The rings of all warps follow the list, and the candidate buffer follows them.
template <typename T>
GVR_DEVICE unsigned char* pipeline_storage(const RowContext<T>& ctx, const LaunchTraits& traits) {
  return static_cast<unsigned char*>(ctx.list.end(traits.list_capacity()));
}

template <typename T>
GVR_DEVICE BufferedValue* buffer_storage(const RowContext<T>& ctx, const LaunchTraits& traits) {
  return reinterpret_cast<BufferedValue*>(pipeline_storage(ctx, traits) + kWarps * AsyncPipeline<T>::kBytes);
}

template <typename T>
GVR_DEVICE AsyncPipeline<T> make_pipeline(const RowContext<T>& ctx, const LaunchTraits& traits) {
  const int lead = ctx.row.lead, n = lead + ctx.row.n;  // from the boundary ahead of the row
  // The first CTA's part holds the first k positions.
  const bool holds_them = lead == 0 && ctx.k <= kMaxSoloK;
  const int divided = holds_them ? n : max(n, (lead + ctx.k) << ctx.log2_ctas);
  const int span = warp_span(divided, ctx.log2_ctas, sizeof(T));
  const int begin = min((ctx.rank * kWarps + ctx.warp) * span, n);
  return AsyncPipeline<T>(ctx.row.boundary() + begin, min(span, n - begin), ctx.warp, ctx.lane,
                          pipeline_storage(ctx, traits));
}

template <typename T>
GVR_DEVICE CandidateBuffer make_buffer(const RowContext<T>& ctx, const LaunchTraits& traits) {
  return CandidateBuffer(buffer_storage(ctx, traits), ctx.shared->buffer_chunks[ctx.warp], kMaxBufferChunks,
                         ctx.warp);
}

// Buffers the elements of tiles under way that are not below the interval. An interval that may be dense is
// left to `radix_fallback`, but only once all CTAs agree on it: until then the buffer counts as full.
template <typename T>
GVR_DEVICE void collect(const RowContext<T>& ctx, const AsyncPipeline<T>& pipeline, TileProducer<T>& producer,
                        const KeyInterval& interval, CandidateBuffer& buffer) {
  buffer.claim_part(ctx.lane);
  buffer.full = may_be_dense(interval);
  if (buffer.full) {
    ptx::wait_copies<0>();
  } else {
    filter_row(ctx, pipeline, producer, interval.low(), buffer);
  }
}

}  // namespace gvr_topk::streaming
