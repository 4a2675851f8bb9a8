// The common parts of the compiled ops: the device and the stream of a call, and the checks of its tensors.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "capability.h"
#include "check.h"
#include "flags.h"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"

// The torch header hides this function from builds without USE_CUDA, and a CPU build of torch lacks it. It is
// declared weak, so that the library loads there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace gvr_topk {

using OptionalTensor = std::optional<Tensor>;

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    require(cudaGetDevice(&previous_) == cudaSuccess, "gvr_topk: no usable CUDA device");
    if (previous_ != device) {
      require(cudaSetDevice(device) == cudaSuccess, "gvr_topk: cannot select cuda:", device);
      changed_ = true;
    }
  }
  // Restores the device only if it was changed. Selecting the device that is current would make its primary
  // context current, and so take a caller out of its green context.
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      check(false, "logits: wanted dtype float32, bfloat16 or float16, got ", name_of(logits.scalar_type()));
      return Dtype::kFloat32;
  }
}

template <typename T>
T* pointer(const OptionalTensor& t) {
  return t.has_value() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

// The nearest 32-bit number. A tensor may have more slots or pages than such a number counts. The ones beyond
// are never accessed, because slots and positions are 32-bit numbers themselves.
inline int32_t clamped(int64_t value) {
  using Limits = std::numeric_limits<int32_t>;
  return static_cast<int32_t>(std::clamp<int64_t>(value, Limits::min(), Limits::max()));
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&value, attribute, device);
  require(status == cudaSuccess, "gvr_topk: cannot query the device: ", cudaGetErrorString(status));
  return value;
}

// The stream of a call, what its context has room for, and the GPU's architecture.
struct CallTarget {
  cudaStream_t stream;
  StreamContext context;
  int32_t arch;

  // The caller holds a `DeviceGuard` for the same device.
  explicit CallTarget(int device) {
    void* handle = nullptr;
    require(aoti_torch_get_current_cuda_stream(device, &handle) == 0, "gvr_topk: no current CUDA stream");
    stream = static_cast<cudaStream_t>(handle);
    context = context_of(stream, device, device_attribute(cudaDevAttrMultiProcessorCount, device));
    arch = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
           device_attribute(cudaDevAttrComputeCapabilityMinor, device);
    check(arch >= kMinArch, "logits: wanted a GPU of compute capability 9.0 or later, got ", arch / 10, ".",
          arch % 10);
  }
};

// Checks the scores: [rows, width] on a GPU, with inner stride 1.
inline void check_logits(const Tensor& logits) {
  check(logits.is_cuda(), "logits: wanted a CUDA tensor, got one on another device");
  dtype_of(logits);
  check(logits.dim() == 2, "logits: wanted shape [rows, width], got ", describe(logits));
  const int64_t rows = logits.size(0), width = logits.size(1);
  check(width <= 1 || logits.stride(1) == 1, "logits: wanted inner stride 1, got ", logits.stride(1));
  check(width <= kMaxWidth, "logits: wanted at most ", kMaxWidth, " columns, got ", width);
  check(rows <= kMaxRows, "logits: wanted at most ", kMaxRows, " rows, got ", rows);
}

inline void check_k(int64_t k) { check(k >= 1 && k <= kMaxWidth, "k: wanted 1 to ", kMaxWidth, ", got ", k); }

// Checks the lengths: one for each request, which has `next_n` rows, or one for each row.
inline void check_lengths(const Tensor& logits, const Tensor& seq_lens, int64_t next_n,
                          int64_t compress_ratio) {
  const int64_t rows = logits.size(0);
  check(next_n >= 1 && next_n <= kMaxNextN, "next_n: wanted 1 to ", kMaxNextN, ", got ", next_n);
  check(rows % next_n == 0, "logits: wanted a multiple of next_n = ", next_n, " rows, got ", rows);
  check(compress_ratio >= 1 && compress_ratio <= kMaxWidth, "compress_ratio: wanted 1 to ", kMaxWidth,
        ", got ", compress_ratio);
  check_tensor(seq_lens, "seq_lens", logits.get_device(), ScalarType::Int, {kAny});
  const int64_t requests = rows / next_n, lengths = seq_lens.size(0);
  check(lengths == requests || lengths == rows, "seq_lens: wanted ", requests,
        requests == rows ? "" : " or " + std::to_string(rows), " elements, got ", describe(seq_lens));
}

// Checks the page table, which has `requests` rows, and the tensor for cache slots, if that is not `out`.
inline void check_pages(const OptionalTensor& page_table, const OptionalTensor& slots, int64_t page_size,
                        int32_t device, int64_t rows, int64_t requests, int64_t k) {
  if (slots) {
    check(page_table.has_value(), "slots: wanted a page_table beside it, got None");
    check_results(*slots, "slots", device, rows, k);
  }
  if (!page_table) return;
  check_tensor(*page_table, "page_table", device, ScalarType::Int, {requests, kAny});
  check(page_size >= 1 && page_size <= kMaxPageSize, "page_size: wanted 1 to ", kMaxPageSize,
        " with a page_table, got ", page_size);
}

inline void check_counts_and_stats(const OptionalTensor& counts, const OptionalTensor& stats, int32_t device,
                                   int64_t rows) {
  if (counts) check_tensor(*counts, "counts", device, ScalarType::Int, {rows});
  if (!stats) return;
  check_tensor(*stats, "stats", device, ScalarType::Int, {rows, kStatColumns});
  check_contiguous(*stats, "stats");
}

// An empty tensor has a null address, which would mean that there is no page table. No page of an empty table
// is read, so any address that is not null will do.
inline const int32_t* page_pointer(const OptionalTensor& page_table, const void* other) {
  const auto* pages = pointer<const int32_t>(page_table);
  return page_table && pages == nullptr ? static_cast<const int32_t*>(other) : pages;
}

}  // namespace gvr_topk
