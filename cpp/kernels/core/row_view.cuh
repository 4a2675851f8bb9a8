// Describes one row of scores, and how its first part lies in shared memory once it is staged.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"
#include "ptx/memory.cuh"

namespace gvr_topk {

template <typename T>
struct RowView {
  const T* data;
  int n;     // visible length
  int lead;  // elements from a boundary ahead of the row, of 16 bytes or a line, to the row

  // Kernels read vectors of 16 bytes from there. What lies ahead of the row belongs to the same allocation,
  // but is not the row's.
  GVR_DEVICE const T* boundary() const { return data - lead; }

  GVR_DEVICE uint32_t key(int i) const { return order_key(to_float(data[i])); }
};

// Elements from the last multiple of `kBytes` bytes to a row.
template <typename T, int kBytes>
GVR_DEVICE int lead_of(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % (kBytes / sizeof(T)));
}

// The whole buffer of a row, independent of the row's length. `aligned`: no row has a lead. The lead of
// others begins with a line of memory, or each group of vectors that a warp reads would lie in one line more.
// A buffer without columns may lie nowhere, and has no lead.
template <typename T>
GVR_DEVICE RowView<T> row_buffer(const TopkParams& p, bool aligned, int row) {
  const T* data = static_cast<const T*>(p.logits) + row * p.logits_stride;
  return RowView<T>{data, p.width, aligned || p.width == 0 ? 0 : lead_of<T, kLineBytes>(data)};
}

// Loads `count` elements at `p` one by one, packed as a 16-byte load would bring them. It is out of line: few
// vectors need it, and inlined it would fill the instruction cache.
template <typename T>
__device__ __noinline__ uint4 load_elements(const T* p, int count) {
  const uint4 absent = negative_infinity_vec<T>();
  uint32_t word[4] = {absent.x, absent.y, absent.z, absent.w};
#pragma unroll
  for (int e = 0; e < kPerVec<T>; ++e) {
    if (e >= count) break;
    if constexpr (sizeof(T) == 4) {
      word[e] = __float_as_uint(p[e]);
    } else {
      const uint32_t half = *reinterpret_cast<const uint16_t*>(p + e);
      word[e / 2] = e % 2 == 0 ? (word[e / 2] & 0xffff0000u) | half : (word[e / 2] & 0xffffu) | half << 16;
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Returns the index at which vector `vec` of the 32 * `vecs` vectors that a warp has staged lies.
// Neighbouring lanes read vectors that are `vecs` apart and need different banks. An odd distance gives them;
// an even one needs the exclusive or.
GVR_DEVICE uint32_t staged_index(uint32_t vec, int vecs) { return vec ^ (vec >> 3 & (vecs % 2 - 1) & 7); }

// The start of a row, as all warps of a CTA have staged it: 32 * `vecs` vectors each, in index order.
struct StagedRow {
  uint32_t begin;   // shared address of the first warp's vectors
  uint32_t stride;  // bytes from one warp's vectors to those of the next
  int vecs;         // 0: nothing that can be used is staged

  GVR_DEVICE uint32_t address(int warp, uint32_t vec) const {
    return begin + warp * stride + sizeof(uint4) * staged_index(vec, vecs);
  }
};

}  // namespace gvr_topk
