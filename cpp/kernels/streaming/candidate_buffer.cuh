// The candidates that one CTA keeps of a row while the row streams by, with their values.
#pragma once

#include "core/chunked_store.cuh"

namespace gvr_topk::streaming {

struct CandidateBuffer : ChunkedStore<BufferedValue, kWarps> {
  // The candidate that is first in index order: warps start mid-part, so earlier candidates follow the last.
  int rotation = 0;

  using ChunkedStore::ChunkedStore;

  // Whether `x` was buffered: padding is -inf, and -inf never is.
  __device__ __forceinline__ static bool is_buffered(const BufferedValue& x) { return x.value != -INFINITY; }

  // Turns every NaN into infinity and everything else into -inf, because NaN itself does not compare. All
  // lanes take part.
  __device__ __forceinline__ void keep_only_nan(int lane) const {
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      BufferedValue& x = store[chunks[i >> kLog2Chunk] * kChunk + (i & (kChunk - 1))];
      x.value = x.value != x.value ? INFINITY : -INFINITY;
    }
    __syncwarp();
  }

  // Calls visit(candidate) for this lane's part of the candidates, in index order. All lanes take part; some
  // get -inf.
  template <typename Visit>
  __device__ __forceinline__ void for_each(int lane, Visit visit) const {
    ChunkedStore::for_each(lane, rotation, BufferedValue{0, -INFINITY}, visit);
  }
};

}  // namespace gvr_topk::streaming
