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

// A tensor of a call, or null for one that is optional and not given.
class TensorArgument {
 public:
  TensorArgument(const Tensor& t) : tensor_(&t) {}
  TensorArgument(const OptionalTensor& t) : tensor_(t ? &*t : nullptr) {}
  explicit operator bool() const { return tensor_ != nullptr; }
  const Tensor& operator*() const { return *tensor_; }
  const Tensor* operator->() const { return tensor_; }

 private:
  const Tensor* tensor_;
};

// ---------------------------------------------------------------- methods of Python's `Checks`

inline void check_integer(const char* name, int64_t value, int64_t low, int64_t high) {
  check(low <= value && value <= high, name, ": wanted ", low, " to ", high, ", got ", value);
}

inline void check_score_values(const char* name, TensorArgument t) {
  const ScalarType dtype = t->scalar_type();
  check(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name,
        ": wanted dtype float32, bfloat16 or float16, got ", name_of(dtype));
}

// Checks that a tensor is on the device of `like`, of `dtype` and of `shape`, with inner stride 1.
inline void check_tensor(const char* name, TensorArgument t, TensorArgument like, ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  check(t->is_cuda() == like->is_cuda() && t->get_device() == like->get_device(), name,
        ": wanted a tensor on ", DeviceName{*like}, ", got ", DeviceName{*t});
  check(t->scalar_type() == dtype, name, ": wanted dtype ", name_of(dtype), ", got ",
        name_of(t->scalar_type()));
  bool same = t->dim() == static_cast<int64_t>(shape.size());
  int64_t dimension = 0;
  for (const int64_t n : shape) {
    if (!same) break;
    same = n == kAny || t->size(dimension) == n;
    ++dimension;
  }
  check(same, name, ": wanted ", Wanted{shape}, ", got ", describe(*t));
  const int64_t last = t->dim() - 1;
  check(t->size(last) <= 1 || t->stride(last) == 1, name, ": wanted inner stride 1, got ", t->stride(last));
}

// Checks a tensor of tokens or slots, of one of two dtypes.
inline void check_ids(const char* name, TensorArgument t, TensorArgument like,
                      std::initializer_list<int64_t> shape) {
  const ScalarType dtype = t->scalar_type();
  check(dtype == ScalarType::Long || dtype == ScalarType::Int, name, ": wanted dtype int64 or int32, got ",
        name_of(dtype));
  check_tensor(name, t, like, dtype, shape);
}

inline void check_contiguous(const char* name, TensorArgument t) {
  check(t->size(0) <= 1 || t->stride(0) == t->size(1), name, ": wanted contiguous rows, got strides (",
        t->stride(0), ", ", t->stride(1), ")");
}

// Checks that kernels can read and write a tensor of states 16 bytes at a time.
inline void check_states(const char* name, TensorArgument t) {
  check_contiguous(name, t);
  check(reinterpret_cast<uintptr_t>(t->data_ptr()) % 16 == 0, name,
        ": wanted an address that is a multiple of 16, got one that is not");
}

}  // namespace gvr_topk
