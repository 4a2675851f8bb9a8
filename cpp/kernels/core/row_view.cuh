// Describes one row of scores, and how its elements lie in the lanes of a warp.
//
// A warp covers 512 consecutive elements at a time: a tile of 16 elements per lane. Vector j of a lane starts
// at j * 32 * kPerVec + lane * kPerVec, so loads are 16 bytes wide and coalesced. Index order within such a
// tile is (j, lane, element). Tiles of core/tile_ring.cuh and resident/cluster_tile.cuh have 16 or more
// consecutive elements in each lane instead.
#pragma once

#include <cstdint>

#include "core/key.cuh"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"
#include "ptx/memory.cuh"

namespace gvr_topk {

constexpr int kTileElements = 32 * kValuesPerThread;

template <typename T>
struct RowView {
  const T* data;
  int n;         // visible length
  bool aligned;  // whether 16-byte loads are possible

  GVR_DEVICE uint32_t key(int i) const { return order_key(to_float(data[i])); }
};

// The whole buffer of a row, independent of the row's length.
template <typename T>
GVR_DEVICE RowView<T> row_buffer(const TopkParams& p, bool aligned, int row) {
  const T* data = static_cast<const T*>(p.logits) + row * p.logits_stride;
  return RowView<T>{data, p.width, aligned};
}

// First position of vector `j` of this lane, in the tile that starts at `begin`.
template <typename T>
GVR_DEVICE int vec_position(int begin, int j, int lane) {
  return begin + (j * 32 + lane) * kPerVec<T>;
}

// The register of an index known only at run time: a tree of selections, because registers have no addresses.
template <int kFirst, int kCount, int kValues>
GVR_DEVICE uint32_t register_at(const uint32_t (&registers)[kValues], uint32_t index) {
  if constexpr (kCount == 1) {
    return registers[kFirst];
  } else {
    constexpr int kLower = kCount / 2;
    const uint32_t lower = register_at<kFirst, kLower>(registers, index);
    const uint32_t upper = register_at<kFirst + kLower, kLower>(registers, index);
    return (index & kLower) != 0 ? upper : lower;
  }
}

// One lane's part of a tile as it lies in memory: 16 elements, so rows of 16-bit types take half of the
// registers.
template <typename T>
struct Tile {
  static constexpr int kVecs = kValuesPerThread / kPerVec<T>;
  static constexpr int kGroup = 32 * kPerVec<T>;  // elements of one vector over the warp
  uint4 vec[kVecs];

  GVR_DEVICE float value(int i) const { return element<T>(vec[i / kPerVec<T>], i % kPerVec<T>); }

  // The value at an index known only at run time.
  GVR_DEVICE float value_at(int i) const {
    constexpr int kWords = 4 * kVecs;
    uint32_t word[kWords];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      word[4 * j] = vec[j].x, word[4 * j + 1] = vec[j].y;
      word[4 * j + 2] = vec[j].z, word[4 * j + 3] = vec[j].w;
    }
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(register_at<0, kWords>(word, i));
    } else {
      const ushort bits = static_cast<ushort>(register_at<0, kWords>(word, i / 2) >> (16 * (i & 1)));
      return to_float(*reinterpret_cast<const T*>(&bits));
    }
  }
};

// Loads `count` elements at `p` one by one, packed as a 16-byte load would bring them. It is out of line:
// only the last vector of a row and unaligned rows need it, and inlined it would fill the instruction cache.
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

// Loads this lane's elements of [begin, min(end, begin + 512)). Elements past `end` become -inf: no test
// against a finite bound finds them, and tests on keys mask them (`valid_bits`). `fetch(j, address)` loads
// vector j. It is called only if the whole vector is needed and 16-byte access is possible.
template <typename T, typename Fetch>
GVR_DEVICE void load_tile(const RowView<T>& row, int begin, int end, int lane, Tile<T>& tile, Fetch fetch) {
  constexpr int kVecs = Tile<T>::kVecs;
  constexpr int kGroup = Tile<T>::kGroup;
  const int length = end - begin;
  const int left = length - lane * kPerVec<T>;  // elements from this lane's first vector on
  const T* first = row.data + begin + lane * kPerVec<T>;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    tile.vec[j] = negative_infinity_vec<T>();
    if (row.aligned && j * kGroup + kPerVec<T> <= left) {
      tile.vec[j] = fetch(j, first + j * kGroup);
    }
  }
  if (row.aligned && (length % kPerVec<T> == 0 || length >= kTileElements)) return;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int count = left - j * kGroup;
    if (count > 0 && (!row.aligned || count < kPerVec<T>)) {
      tile.vec[j] = load_elements(first + j * kGroup, count);
    }
  }
}

template <typename T>
GVR_DEVICE void load_tile(const RowView<T>& row, int begin, int end, int lane, Tile<T>& tile) {
  load_tile(row, begin, end, lane, tile, [](int, const T* p) { return ptx::load_streaming(p); });
}

// Bits of this lane's elements that lie before `end`.
template <typename T>
GVR_DEVICE uint32_t valid_bits(int begin, int end, int lane) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < Tile<T>::kVecs; ++j) {
    const int count = min(max(end - vec_position<T>(begin, j, lane), 0), kPerVec<T>);
    bits |= ((1u << count) - 1) << (j * kPerVec<T>);
  }
  return bits;
}

// Bits of the elements of one tile for which `test(value)` holds. Vectors past `end` are skipped, which are
// most vectors if a warp has few elements.
template <typename T, typename Test>
GVR_DEVICE uint32_t match_tile(const Tile<T>& tile, int begin, int end, Test test) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < Tile<T>::kVecs; ++j) {
    if (begin + j * Tile<T>::kGroup >= end) break;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      if (test(tile.value(j * kPerVec<T> + e))) bits |= 1u << (j * kPerVec<T> + e);
    }
  }
  return bits;
}

// Position in the row of bit `bit` of this lane's tile.
template <typename T>
GVR_DEVICE int bit_position(int begin, int bit, int lane) {
  return vec_position<T>(begin, bit / kPerVec<T>, lane) + bit % kPerVec<T>;
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
