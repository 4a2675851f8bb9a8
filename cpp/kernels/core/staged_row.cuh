// Describes where copies have staged the vectors of a row in shared memory. The copies read the row in
// coalesced order, and later each lane takes consecutive elements.
#pragma once

#include <cstdint>

namespace gvr_topk {

// Returns the index at which vector `vec` of the 32 * `vecs` vectors that a warp has staged lies.
// Neighbouring lanes read vectors that are `vecs` apart and need different banks. An odd distance gives them;
// an even one needs the exclusive or.
__device__ __forceinline__ uint32_t staged_index(uint32_t vec, int vecs) {
  return vec ^ (vec >> 3 & (vecs % 2 - 1) & 7);
}

// The start of a row, as all warps of a CTA have staged it: 32 * `vecs` vectors each, in index order.
struct StagedRow {
  uint32_t begin;   // shared address of the first warp's vectors
  uint32_t stride;  // bytes from one warp's vectors to those of the next
  int vecs;         // 0: nothing that can be used is staged

  __device__ __forceinline__ uint32_t address(int warp, uint32_t vec) const {
    return begin + warp * stride + sizeof(uint4) * staged_index(vec, vecs);
  }
};

}  // namespace gvr_topk
