// Rows of a prefill chunk: the order in which a CTA takes them, and the columns that each may select from.
#pragma once

#include <cstdint>

#include "core/row_view.cuh"
#include "gvr_topk/params.h"

namespace gvr_topk {

// One thread reads a row's numbers from the caller's tensors, because another stream may be writing them and
// two threads could read different numbers. The other threads take the window from shared memory, after a
// block barrier.
struct Window {
  int32_t row;      // negative: there are no more rows
  int32_t start;    // first column
  int32_t n;        // columns
  int32_t request;  // whose page table and offset are used
  int32_t offset;   // added to positions in the output
};

// The numbers that make up a row's window. They are loaded here and first used by `window`, so that other
// work can run while they are being loaded.
struct WindowLoad {
  int32_t row, start, end, request;

  // `row` is negative after the last row.
  __device__ __forceinline__ WindowLoad(const PrefillParams& p, int32_t row_) : row(row_) {
    if (row < 0) return;
    start = p.row_starts[row];
    end = p.row_ends[row];
    request = p.row_request != nullptr ? p.row_request[row] : row;
  }

  __device__ __forceinline__ Window window(const PrefillParams& p) const {
    // A row without a valid request is a padding row, which has nothing to select from.
    if (row < 0 || static_cast<uint32_t>(request) >= static_cast<uint32_t>(p.requests)) {
      return Window{row, 0, 0, 0, 0};
    }
    const int first = max(start, 0), window_end = min(end, p.width);
    const int offset = p.offsets != nullptr ? p.offsets[request] : 0;
    return Window{row, first, max(window_end, first) - first, request, offset};
  }
};

// A window extended down to a multiple of 16 bytes: `lead` elements lie between that address and the window.
template <typename T>
struct AlignedWindow {
  const T* data;
  int lead;
  int length;  // elements of the lead and the window together

  __device__ __forceinline__ AlignedWindow(const PrefillParams& p, const Window& window) {
    const T* first = static_cast<const T*>(p.logits) + window.row * p.logits_stride + window.start;
    lead = static_cast<int>(reinterpret_cast<uintptr_t>(first) / sizeof(T) % kPerVec<T>);
    data = first - lead;
    length = lead + window.n;
  }

  __device__ __forceinline__ RowView<T> view() const { return RowView<T>{data, length, true}; }
};

// The rows of a CTA, in runs of neighbours: neighbouring rows are alike, so each predicts the next. The rows
// form `runs_per_cta` stripes, each with one run for every CTA, and the CTA order alternates from stripe to
// stripe. Rows of a causal chunk grow longer one by one, so the alternation gives all CTAs equal work.
struct Schedule {
  int32_t stripe, row, end;

  __device__ __forceinline__ void start_run(const PrefillParams& p, int32_t number) {
    stripe = number;
    const uint32_t cta = (stripe & 1) != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const uint64_t run = uint64_t{static_cast<uint32_t>(stripe)} * gridDim.x + cta;
    const uint64_t runs = uint64_t{static_cast<uint32_t>(p.runs_per_cta)} * gridDim.x;
    row = static_cast<int32_t>(run * p.rows / runs);
    end = static_cast<int32_t>((run + 1) * p.rows / runs);
  }

  // The next row, or -1 after the last one.
  __device__ __forceinline__ int32_t next(const PrefillParams& p) {
    while (row == end) {
      if (stripe + 1 == p.runs_per_cta) return -1;
      start_run(p, stripe + 1);
    }
    return row++;
  }
};

}  // namespace gvr_topk
