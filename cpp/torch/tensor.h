// The tensors of a call, as the checks and the launch read them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace gvr_topk {

using torch::headeronly::ScalarType;
// What libtorch passes to an op.
using GivenTensor = torch::stable::Tensor;
using OptionalGivenTensor = std::optional<GivenTensor>;

// What a call needs to know of a tensor, asked for once: every question to a `GivenTensor` is a call into
// libtorch, and the checks of one call ask about a hundred. The given tensor must outlive it.
class Tensor {
 public:
  Tensor(const GivenTensor& given)  // implicit, so that a list of given tensors makes the arguments of a call
      : given_(&given),
        sizes_(given.sizes()),
        strides_(given.strides()),
        data_ptr_(given.data_ptr()),
        scalar_type_(given.scalar_type()),
        is_cuda_(given.is_cuda()),
        device_(given.get_device()) {}

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t dimension) const { return sizes_[dimension]; }
  int64_t stride(int64_t dimension) const { return strides_[dimension]; }
  void* data_ptr() const { return data_ptr_; }
  ScalarType scalar_type() const { return scalar_type_; }
  bool is_cuda() const { return is_cuda_; }
  bool is_cpu() const { return given_->is_cpu(); }
  int get_device() const { return device_; }

 private:
  const GivenTensor* given_;
  torch::headeronly::IntHeaderOnlyArrayRef sizes_;
  torch::headeronly::IntHeaderOnlyArrayRef strides_;
  void* data_ptr_;
  ScalarType scalar_type_;
  bool is_cuda_;
  int device_;
};
using OptionalTensor = std::optional<Tensor>;

}  // namespace gvr_topk
