// Argument checks of the ops: device, then dtype, then shape, then layout. Messages name the argument, what
// was wanted and what was got.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "tensor.h"

namespace gvr_topk {

// The op whose arguments this thread checks. Every message about an argument begins with the op's name, so
// that Python can tell it from other errors.
inline thread_local const char* checked_op = "";

class CheckedOp {
 public:
  explicit CheckedOp(const char* name) { checked_op = name; }
  ~CheckedOp() { checked_op = ""; }
  CheckedOp(const CheckedOp&) = delete;
  CheckedOp& operator=(const CheckedOp&) = delete;
};

template <typename... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  require(ok, "gvr_topk.", checked_op, ": ", parts...);
}

// The text is made only where a check fails, because checks run in every call.
struct Description {
  const Tensor& tensor;
};

inline Description describe(const Tensor& t) { return {t}; }

inline std::ostream& operator<<(std::ostream& out, const Description& description) {
  const Tensor& t = description.tensor;
  out << "[";
  for (int64_t i = 0; i < t.dim(); ++i) out << (i > 0 ? ", " : "") << t.size(i);
  return out << "]";
}

constexpr int64_t kAny = -1;

struct Wanted {
  std::initializer_list<int64_t> shape;
};

inline std::ostream& operator<<(std::ostream& out, const Wanted& wanted) {
  out << "shape [";
  const char* separator = "";
  for (const int64_t n : wanted.shape) {
    out << separator;
    separator = ", ";
    n == kAny ? out << "any" : out << n;
  }
  return out << "]";
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

struct DeviceName {
  const Tensor& tensor;
};

inline std::ostream& operator<<(std::ostream& out, const DeviceName& name) {
  const Tensor& t = name.tensor;
  if (t.is_cuda()) return out << "cuda:" << t.get_device();
  return out << (t.is_cpu() ? "cpu" : "another device");
}

// Checks that a tensor is on the device of `like`, of `dtype` and of `shape`, with inner stride 1.
inline void check_tensor(const Tensor& t, const char* name, const Tensor& like, ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  check(t.is_cuda() == like.is_cuda() && t.get_device() == like.get_device(), name, ": wanted a tensor on ",
        DeviceName{like}, ", got ", DeviceName{t});
  check(t.scalar_type() == dtype, name, ": wanted dtype ", name_of(dtype), ", got ",
        name_of(t.scalar_type()));
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  int64_t dimension = 0;
  for (const int64_t n : shape) {
    if (!same) break;
    same = n == kAny || t.size(dimension) == n;
    ++dimension;
  }
  check(same, name, ": wanted ", Wanted{shape}, ", got ", describe(t));
  const int64_t last = t.dim() - 1;
  check(t.size(last) <= 1 || t.stride(last) == 1, name, ": wanted inner stride 1, got ", t.stride(last));
}

// Checks that rows do not overlap. Two blocks would write overlapping rows at once, and the rows would hold
// neither block's result.
inline void check_rows_apart(const Tensor& t, const char* name, int64_t columns) {
  check(t.size(0) <= 1 || t.stride(0) >= columns, name, ": wanted rows that do not overlap, at least ",
        columns, " elements apart, got ", t.stride(0));
}

inline void check_contiguous(const Tensor& t, const char* name) {
  const int64_t columns = t.size(1);
  check(t.size(0) <= 1 || t.stride(0) == columns, name, ": wanted contiguous rows, got strides (",
        t.stride(0), ", ", t.stride(1), ")");
}

// Checks a tensor of results: [rows, >= k] of int32. `count` names the argument that gives k.
inline void check_results(const Tensor& t, const char* name, const Tensor& like, int64_t rows, int64_t k,
                          const char* count = "k") {
  check_tensor(t, name, like, ScalarType::Int, {rows, kAny});
  check(t.size(1) >= k, name, ": wanted at least ", count, " = ", k, " columns, got ", describe(t));
  check_rows_apart(t, name, k);
}

}  // namespace gvr_topk
