// One row of scores and the way its elements are laid over a warp.
//
// A warp covers 1024 consecutive elements at a time (a "word" per lane: 32 elements). Vector j of a
// lane starts at j * 32 * kPerVec + lane * kPerVec, so loads are 16 bytes wide and coalesced, and
// index order is (j, lane, element): the order every rank below is computed in.
#pragma once

#include "common/key.cuh"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"
#include "ptx/memory.cuh"

namespace gvr_topk {

constexpr int kWordElements = 32 * kValuesPerThread;

template <typename T>
struct Row {
  const T* data;
  int n;         // visible length
  bool aligned;  // 16-byte loads are possible

  __device__ __forceinline__ uint32_t key(int i) const { return order_key(to_float(data[i])); }

  // Key at a position nobody vouches for; absent when it is outside the row.
  __device__ __forceinline__ uint32_t key_or_absent(int64_t i) const {
    return i >= 0 && i < n ? key(static_cast<int>(i)) : kAbsentKey;
  }
};

__device__ __forceinline__ int row_length(const TopkParams& p, int row) {
  return p.seq_lens[row / p.next_n] - p.next_n + row % p.next_n + 1;
}

template <typename T>
__device__ __forceinline__ Row<T> row_view(const TopkParams& p, int row) {
  Row<T> view;
  view.data = static_cast<const T*>(p.logits) + row * p.logits_stride;
  const int n = row_length(p, row);
  view.n = n < p.width ? n : p.width;
  view.aligned = (reinterpret_cast<uintptr_t>(view.data) & 15) == 0;
  return view;
}

// First position of vector `j` of this lane in the word that starts at `begin`.
template <typename T>
__device__ __forceinline__ int vec_position(int begin, int j, int lane) {
  return begin + (j * 32 + lane) * kPerVec<T>;
}

// Keys of this lane's 32 elements of the word [begin, min(end, begin + 1024)); absent past `end`.
template <typename T>
__device__ __forceinline__ void load_word(const Row<T>& row, int begin, int end, int lane,
                                          uint32_t (&key)[kValuesPerThread]) {
  constexpr int kVecs = kValuesPerThread / kPerVec<T>;
  uint4 raw[kVecs];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = vec_position<T>(begin, j, lane);
    raw[j] = make_uint4(0, 0, 0, 0);
    if (row.aligned && i + kPerVec<T> <= end) raw[j] = ptx::load_streaming(row.data + i);
  }
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int i = vec_position<T>(begin, j, lane);
    uint32_t* out = key + j * kPerVec<T>;
    if (row.aligned && i + kPerVec<T> <= end) {
      unpack_keys<T>(raw[j], out);
    } else {
#pragma unroll
      for (int e = 0; e < kPerVec<T>; ++e) out[e] = i + e < end ? row.key(i + e) : kAbsentKey;
    }
  }
}

// Bits of the elements of one word for which `test(key)` holds. Vectors past `end` are skipped: with
// few elements per warp that is most of them.
template <typename T, typename Test>
__device__ __forceinline__ uint32_t match_word(const uint32_t (&key)[kValuesPerThread], int begin,
                                               int end, Test test) {
  constexpr int kVecs = kValuesPerThread / kPerVec<T>;
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    if (begin + j * 32 * kPerVec<T> >= end) break;
#pragma unroll
    for (int e = 0; e < kPerVec<T>; ++e) {
      if (test(key[j * kPerVec<T> + e])) bits |= 1u << (j * kPerVec<T> + e);
    }
  }
  return bits;
}

// Position in the row of bit `bit` of this lane's word.
template <typename T>
__device__ __forceinline__ int bit_position(int begin, int bit, int lane) {
  return vec_position<T>(begin, bit / kPerVec<T>, lane) + bit % kPerVec<T>;
}

}  // namespace gvr_topk
