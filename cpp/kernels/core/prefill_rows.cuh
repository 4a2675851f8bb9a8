// Rows of a prefill chunk: the order in which a CTA takes them, the columns that each may select from, and
// where its results go.
#pragma once

#include <cstdint>

#include "core/output_writer.cuh"
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
  GVR_DEVICE WindowLoad(const PrefillParams& p, int32_t row_) : row(row_) {
    if (row < 0) return;
    start = p.row_starts[row];
    end = p.row_ends[row];
    request = p.row_request != nullptr ? p.row_request[row] : row;
  }

  GVR_DEVICE Window window(const PrefillParams& p) const {
    // A row without a valid request is a padding row, which has nothing to select from.
    if (row < 0 || static_cast<uint32_t>(request) >= static_cast<uint32_t>(p.requests)) {
      return Window{row, 0, 0, 0, 0};
    }
    const int first = max(start, 0), window_end = min(end, p.width);
    const int offset = p.offsets != nullptr ? p.offsets[request] : 0;
    return Window{row, first, max(window_end, first) - first, request, offset};
  }
};

// A window extended down to a multiple of `kBytes`: `lead` elements lie between that address and the window.
// That is the line it starts in, or each group of vectors that a warp reads would lie in one line more.
template <typename T, int kBytes = kLineBytes>
struct AlignedWindow {
  const T* data;
  int lead;
  int length;  // elements of the lead and the window together

  GVR_DEVICE AlignedWindow(const PrefillParams& p, const Window& window) {
    const T* first = static_cast<const T*>(p.logits) + window.row * p.logits_stride + window.start;
    lead = lead_of<T, kBytes>(first);
    data = first - lead;
    length = lead + window.n;
  }

  // The window itself, which may start anywhere.
  GVR_DEVICE RowView<T> view() const { return RowView<T>{data + lead, length - lead, lead}; }
};

// The rows of a CTA, in runs of neighbours: neighbouring rows are alike, so each predicts the next. The rows
// form `runs_per_cta` stripes, each with one run for every CTA, and the CTA order alternates from stripe to
// stripe. Rows of a causal chunk grow longer one by one, so the alternation gives all CTAs equal work.
struct Schedule {
  int32_t stripe, row, end;

  GVR_DEVICE void start_run(const PrefillParams& p, int32_t number) {
    stripe = number;
    const uint32_t cta = (stripe & 1) != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const uint64_t run = uint64_t{static_cast<uint32_t>(stripe)} * gridDim.x + cta;
    const uint64_t runs = uint64_t{static_cast<uint32_t>(p.runs_per_cta)} * gridDim.x;
    row = static_cast<int32_t>(run * p.rows / runs);
    end = static_cast<int32_t>((run + 1) * p.rows / runs);
  }

  // The next row, or -1 after the last one.
  GVR_DEVICE int32_t next(const PrefillParams& p) {
    while (row == end) {
      if (stripe + 1 == p.runs_per_cta) return -1;
      start_run(p, stripe + 1);
    }
    return row++;
  }
};

// The output of a row of a prefill chunk.
struct PrefillOutput {
  OutputWriter writer;
  int32_t offset;

  GVR_DEVICE PrefillOutput(const PrefillParams& p, const Window& window) : writer{} {
    writer.indices = p.indices + window.row * p.indices_stride;
    writer.pages = p.page_table != nullptr ? p.page_table + window.request * p.page_table_stride : nullptr;
    writer.cache_slots = p.slots != nullptr ? p.slots + window.row * p.slots_stride : nullptr;
    writer.k = p.k;
    writer.page_size = p.page_size;
    writer.pages_per_request = p.pages_per_request;
    offset = window.offset;
  }

  // Whether positions are written unchanged, and to `indices` only.
  GVR_DEVICE bool is_plain() const { return offset == 0 && writer.pages == nullptr; }

  // Whether the row's k positions are written unchanged, four at a time.
  GVR_DEVICE bool takes_vectors(int k) const {
    return is_plain() && k % 4 == 0 && reinterpret_cast<uintptr_t>(writer.indices) % sizeof(int4) == 0;
  }

  // Writes a position of the window, or -1, as the row's item `item`.
  GVR_DEVICE void put(int item, int position) const {
    if (offset == 0) return writer.put(item, position);
    writer.put(item, position, shifted(position));
  }

 private:
  GVR_DEVICE int shifted(int position) const {
    const int64_t moved = int64_t{position} + offset;
    return position >= 0 && moved == static_cast<int32_t>(moved) ? static_cast<int32_t>(moved) : -1;
  }
};

GVR_DEVICE int4 four_positions(const int32_t* staged) { return *reinterpret_cast<const int4*>(staged); }
GVR_DEVICE int4 four_positions(const uint16_t* staged) {
  const ushort4 four = *reinterpret_cast<const ushort4*>(staged);
  return make_int4(four.x, four.y, four.z, four.w);
}

// Writes the k positions that all warps of a block have staged.
template <int kBlockThreads, typename Staged>
GVR_DEVICE void write_staged(const Staged* staged, const PrefillOutput& output, int k) {
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
GVR_DEVICE void write_short(const PrefillOutput& output, int n, int k, int threads) {
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
