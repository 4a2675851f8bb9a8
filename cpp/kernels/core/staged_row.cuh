// Rows in shared memory, where copies have put them in coalesced order for lanes that take consecutive
// elements.
#pragma once

#include <cstdint>

namespace gvr_topk {

// Where vector `vec` of a warp that has staged 32 * `vecs` lies. Neighbouring lanes read vectors that lie
// `vecs` apart, and need different banks: an odd distance gives them, an even one needs the exclusive or.
__device__ __forceinline__ uint32_t staged_place(uint32_t vec, int vecs) {
  return vec ^ (vec >> 3 & (vecs % 2 - 1) & 7);
}

// The start of a row, as all warps of a CTA have staged it: each 32 * `vecs` vectors, in index order.
struct StagedRow {
  uint32_t begin;   // shared address of the first warp's vectors
  uint32_t stride;  // bytes from one warp's to the next one's
  int vecs;         // 0: nothing that can be used is staged

  __device__ __forceinline__ uint32_t address(int warp, uint32_t vec) const {
    return begin + warp * stride + sizeof(uint4) * staged_place(vec, vecs);
  }
};

}  // namespace gvr_topk
