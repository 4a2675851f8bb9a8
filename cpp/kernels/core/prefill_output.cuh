// Writes the results of rows of a prefill chunk.
#pragma once

#include <cstdint>

#include "core/output_writer.cuh"
#include "core/window.cuh"
#include "gvr_topk/params.h"

namespace gvr_topk {

// The output of a row of a prefill chunk.
struct PrefillOutput {
  OutputWriter writer;
  int32_t offset;

  __device__ __forceinline__ PrefillOutput(const PrefillParams& p, const Window& window) : writer{} {
    writer.indices = p.indices + window.row * p.indices_stride;
    writer.pages = p.page_table != nullptr ? p.page_table + window.request * p.page_table_stride : nullptr;
    writer.cache_slots = p.slots != nullptr ? p.slots + window.row * p.slots_stride : nullptr;
    writer.k = p.k;
    writer.page_size = p.page_size;
    writer.pages_per_request = p.pages_per_request;
    offset = window.offset;
  }

  // Whether positions are written unchanged, and to `indices` only.
  __device__ __forceinline__ bool is_plain() const { return offset == 0 && writer.pages == nullptr; }

  // Whether the row's k positions are written unchanged, four at a time.
  __device__ __forceinline__ bool takes_vectors(int k) const {
    return is_plain() && k % 4 == 0 && reinterpret_cast<uintptr_t>(writer.indices) % sizeof(int4) == 0;
  }

  // Writes a position of the window, or -1, as the row's item `item`.
  __device__ __forceinline__ void put(int item, int position) const {
    if (offset == 0) return writer.put(item, position);
    writer.put(item, position, shifted(position));
  }

 private:
  __device__ __forceinline__ int shifted(int position) const {
    const int64_t moved = int64_t{position} + offset;
    return position >= 0 && moved == static_cast<int32_t>(moved) ? static_cast<int32_t>(moved) : -1;
  }
};

__device__ __forceinline__ int4 four_positions(const int32_t* staged) {
  return *reinterpret_cast<const int4*>(staged);
}
__device__ __forceinline__ int4 four_positions(const uint16_t* staged) {
  const ushort4 four = *reinterpret_cast<const ushort4*>(staged);
  return make_int4(four.x, four.y, four.z, four.w);
}

// Writes the k positions that all warps of a block have staged.
template <int kBlockThreads, typename Staged>
__device__ __forceinline__ void write_staged(const Staged* staged, const PrefillOutput& output, int k) {
  if (output.takes_vectors(k)) {
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < k; i += 4 * kBlockThreads) {
      *reinterpret_cast<int4*>(output.writer.indices + i) = four_positions(staged + i);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += kBlockThreads) output.put(i, staged[i]);
  }
}

// Writes all positions of a window no longer than k, then -1.
__device__ __forceinline__ void write_short(const PrefillOutput& output, int n, int k, int threads) {
  const auto item = [&](int i) { return i < n ? i : -1; };
  if (output.takes_vectors(k)) {
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < k; i += 4 * threads) {
      *reinterpret_cast<int4*>(output.writer.indices + i) =
          make_int4(item(i), item(i + 1), item(i + 2), item(i + 3));
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += threads) output.put(i, item(i));
  }
}

}  // namespace gvr_topk
