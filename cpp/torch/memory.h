// The check that no tensor that a call writes shares memory with another of its tensors.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "check.h"

namespace gvr_topk {

// The memory of a tensor: `rows` runs of `bytes` each, `stride` bytes apart.
struct MemoryRuns {
  const char* name;
  uintptr_t begin;
  int64_t rows;
  int64_t bytes;
  int64_t stride;

  uintptr_t end() const { return begin + (rows - 1) * stride + bytes; }
};

// Whether two tensors have a byte in common. Rows may lie side by side, as columns of one buffer. Rows with
// different strides count as overlapping if the ranges of memory that they span do.
inline bool overlap(const MemoryRuns& a, const MemoryRuns& b) {
  if (a.begin >= b.end() || b.begin >= a.end()) return false;
  if (a.rows > 1 && b.rows > 1 && a.stride != b.stride) return true;
  const int64_t stride = a.rows > 1 ? a.stride : b.stride;
  if (a.rows == 1 && b.rows == 1) return true;
  const int64_t distance = (static_cast<int64_t>(b.begin - a.begin) % stride + stride) % stride;
  return distance < a.bytes || distance + b.bytes > stride;
}

// Bytes of an element, of the dtypes that ops take.
inline int64_t element_bytes(ScalarType dtype) {
  if (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) return 2;
  return dtype == ScalarType::Long ? 8 : 4;
}

// Compares each written tensor with those that were named before it. Tensors have one dimension or two.
class MemoryCheck {
 public:
  void reads(const char* name, TensorArgument t) { add(name, t, kAny); }

  // Only `columns` elements of each row are written, or all. It may be the tensor named `over` itself.
  void writes(const char* name, TensorArgument t, int64_t columns = kAny, std::string_view over = {}) {
    if (!add(name, t, columns)) return;
    const MemoryRuns& written = runs_[count_ - 1];
    for (int i = 0; i + 1 < count_; ++i) {
      const MemoryRuns& other = runs_[i];
      if (other.name == over && other.begin == written.begin && other.stride == written.stride) continue;
      check(!overlap(written, other), name, ": wanted memory of its own, got memory shared with ",
            other.name);
    }
  }

 private:
  // Adds a tensor; false: it is not given, or has no element.
  bool add(const char* name, TensorArgument t, int64_t columns) {
    if (!t || t->dim() == 0) return false;  // no op takes one without a dimension
    const bool is_table = t->dim() == 2;
    const int64_t rows = is_table ? t->size(0) : 1;
    if (columns == kAny) columns = t->size(is_table ? 1 : 0);
    if (rows == 0 || columns == 0) return false;
    const int64_t size = element_bytes(t->scalar_type());
    MemoryRuns runs{name, reinterpret_cast<uintptr_t>(t->data_ptr()), rows, columns * size,
                    is_table ? t->stride(0) * size : 0};
    if (runs.stride <= runs.bytes) {  // rows without gaps are one run
      runs.bytes += (rows - 1) * runs.stride;
      runs.rows = 1;
    }
    runs_[count_++] = runs;
    return true;
  }

  std::array<MemoryRuns, 18> runs_;  // as many tensors as an op has
  int count_ = 0;
};

}  // namespace gvr_topk
