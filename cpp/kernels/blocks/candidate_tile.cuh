// The scores of candidate blocks, gathered into registers.
#pragma once

#include "blocks/config.cuh"
#include "cluster/row_context.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "small_row/cta_tile.cuh"

namespace gvr_topk::blocks {

// A tile of the scores of all candidates, one candidate behind the other. Its positions are indices in that
// list: index i is the score i % kBlockScores of candidate i / kBlockScores.
template <typename T>
using CandidateTile = small_row::CtaTile<T, kWideValuesPerThread>;

// Returns the position in the row of the score at an index in the list.
__device__ __forceinline__ int position_of_listed(const int32_t* candidates, int index) {
  return candidates[index / kBlockScores] * kBlockScores + index % kBlockScores;
}

// Fills the tile with the keys of `count` candidates. Each is a block that the row has, or kNoBlock. Elements
// that are no scores of the row have key 0, which is below every score's.
template <typename T>
__device__ __forceinline__ void gather(const RowContext<T>& ctx, const int32_t* candidates, int count,
                                       CandidateTile<T>& tile) {
  using Tile = CandidateTile<T>;
  static_assert(kBlockScores % kPerVec<T> == 0, "a vector lies in one block");
  tile.begin = ctx.warp * Tile::kVecs * Tile::kGroup;
  int left[Tile::kVecs];  // scores of the row from the vector's first one on
  const T* data[Tile::kVecs];
#pragma unroll
  for (int j = 0; j < Tile::kVecs; ++j) {
    const int index = tile.begin + j * Tile::kGroup + ctx.lane * kPerVec<T>;
    const bool listed = index / kBlockScores < count;
    const int position = listed ? position_of_listed(candidates, index) : kNoBlock;
    left[j] = position < 0 ? 0 : ctx.row.n - position;
    data[j] = ctx.row.data + position;
    ptx::load_before<0>(kPerVec<T> - 1, ctx.row.aligned ? left[j] : 0, tile.raw[j], data[j]);
  }
#pragma unroll
  for (int j = 0; j < Tile::kVecs; ++j) {
    if (left[j] > 0 && (!ctx.row.aligned || left[j] < kPerVec<T>)) {
      tile.raw[j] = load_elements(data[j], left[j]);
    }
  }
  ptx::reconverge(ctx.zero);
  tile.for_each_index([&](int i) {
    const uint32_t key = order_key(element<T>(tile.raw[i / kPerVec<T>], i % kPerVec<T>)) >> kInvariantBits<T>;
    tile.bits[i] = i % kPerVec<T> < left[i / kPerVec<T>] ? key : 0;
  });
}

}  // namespace gvr_topk::blocks
