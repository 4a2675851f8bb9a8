// The candidates that one CTA keeps of a row that streams by, with their values.
#pragma once

#include "core/chunked_store.cuh"

namespace gvr_topk::streaming {

struct CandidateBuffer : ChunkedStore<BufferedValue, kWarps> {
  int rotation = 0;  // The candidate that is first in index order: warps start mid-part, so earlier ones
                     // follow the last.

  using ChunkedStore::ChunkedStore;

  // Whether `x` was buffered: padding is -inf, and -inf never is.
  __device__ __forceinline__ static bool is_buffered(const BufferedValue& x) {
    return x.value != -__int_as_float(0x7f800000);
  }

  // Turns every NaN into infinity and everything else into -inf, because NaN itself does not compare. All
  // lanes take part.
  __device__ __forceinline__ void keep_only_nan(int lane) const {
    const float infinity = __int_as_float(0x7f800000);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      BufferedValue& x = store[chunks[i >> kLog2Chunk] * kChunk + (i & (kChunk - 1))];
      x.value = x.value != x.value ? infinity : -infinity;
    }
    __syncwarp();
  }

  // Calls visit(candidate) for this lane's part of them, 32 of the warp at a time, in index order. All lanes
  // take part; some see -inf.
  template <typename Visit>
  __device__ __forceinline__ void for_each(int lane, Visit visit) const {
    constexpr int kAtOnce = 4;  // Several, so that their loads overlap.
#pragma unroll 1
    for (int first = lane; first < count + lane; first += 32 * kAtOnce) {
      BufferedValue some[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + 32 * j;
        some[j] = i < count ? at(i + rotation < count ? i + rotation : i + rotation - count)
                            : BufferedValue{0, -__int_as_float(0x7f800000)};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first - lane + 32 * j < count) visit(some[j]);
      }
    }
  }
};

}  // namespace gvr_topk::streaming
