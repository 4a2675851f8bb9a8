// Argument checks of the op: device, then dtype, then layout, then shape. Messages name the argument,
// what was wanted and what was got.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <ostream>
#include <sstream>
#include <stdexcept>

namespace gvr_topk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  message << "gvr_topk.indexer_topk_decode: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Written out only where a check fails, for checks are made in every call.
struct Description {
  const Tensor& tensor;
};

inline Description describe(const Tensor& t) { return {t}; }

inline std::ostream& operator<<(std::ostream& out, const Description& description) {
  const Tensor& t = description.tensor;
  out << "shape [";
  for (int64_t i = 0; i < t.dim(); ++i) out << (i > 0 ? ", " : "") << t.size(i);
  return out << "]";
}

// A tensor on `device` with `dim` dimensions, of `dtype`, inner stride 1.
inline void check_tensor(const Tensor& t, const char* name, int32_t device, ScalarType dtype,
                         const char* dtype_name, int64_t dim) {
  check(t.is_cuda() && t.get_device() == device, name, ": want a tensor on cuda:", device,
        ", got one on another device");
  check(t.scalar_type() == dtype, name, ": want dtype ", dtype_name, ", got scalar type ",
        static_cast<int>(t.scalar_type()));
  check(t.dim() == dim, name, ": want ", dim, " dimensions, got ", describe(t));
  check(t.size(dim - 1) <= 1 || t.stride(dim - 1) == 1, name, ": want inner stride 1, got ",
        t.stride(dim - 1));
}

// Two rows that share memory would be written by two blocks at once, and hold neither's result.
inline void check_rows_apart(const Tensor& t, const char* name, int64_t columns) {
  check(t.size(0) <= 1 || t.stride(0) >= columns, name, ": want rows that do not overlap, at least ", columns,
        " elements apart, got ", t.stride(0));
}

}  // namespace gvr_topk
