// The common parts of the compiled ops: the device and the stream of a call.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "arguments.h"
#include "capability.h"

// The torch header hides this function from builds without USE_CUDA, and a CPU build of torch lacks it. It is
// declared weak, so that the library loads there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace gvr_topk {

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

template <typename T>
T* pointer(const OptionalTensor& t) {
  return t.has_value() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

inline Ids ids_of(const Tensor& t) { return {t.data_ptr(), t.scalar_type() == ScalarType::Long}; }

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&value, attribute, device);
  require(status == cudaSuccess, "gvr_topk: cannot query the device: ", cudaGetErrorString(status));
  return value;
}

inline void check_on_gpu(const Tensor& t, const char* name = "logits") {
  check(t.is_cuda(), name, ": wanted a CUDA tensor, got one on another device");
}

// What does not change of a GPU while a process runs.
struct GpuFacts {
  int32_t sm_count;
  int32_t arch;

  // Asked of the driver where a thread's calls turn to another device.
  static const GpuFacts& of(int device) {
    static thread_local int known_device = -1;
    static thread_local GpuFacts facts{};
    if (device != known_device) {
      facts.sm_count = device_attribute(cudaDevAttrMultiProcessorCount, device);
      facts.arch = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
                   device_attribute(cudaDevAttrComputeCapabilityMinor, device);
      known_device = device;
    }
    return facts;
  }
};

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
    const GpuFacts& gpu = GpuFacts::of(device);
    context = context_of(stream, device, gpu.sm_count);
    arch = gpu.arch;
    check(has_code(arch), "logits: wanted a GPU that the library holds code for (", kBuiltFor,
          "), got compute capability ", arch / 10, ".", arch % 10);
  }
};

inline void require_launched(cudaError_t status) {
  require(status == cudaSuccess, "gvr_topk: launch failed: ", cudaGetErrorString(status));
}

// Memory of a call, in words of 4 bytes, from torch's allocator. It may be given to later work of the current
// stream as soon as the call has been enqueued there.
inline GivenTensor make_workspace(int64_t words, int device) {
  const int64_t stride = 1;
  AtenTensorHandle made = nullptr;
  const auto status = aoti_torch_empty_strided(1, &words, &stride, aoti_torch_dtype_int32(),
                                               aoti_torch_device_type_cuda(), device, &made);
  require(status == 0, "gvr_topk: cannot allocate ", 4 * words, " bytes of device memory");
  return GivenTensor(made);
}

// The plan with the largest clusters that the stream's context can run, up to the planned size. The call is
// refused if its size is forced and cannot run, or if fewer CTAs cannot hold a row.
inline Plan runnable_plan(const TopkParams& params, PlanInput input, const CallTarget& target) {
  Plan plan = make_plan(input);
  while (plan.ctas_per_row > 1 && !can_run(params, plan, target.stream, target.context)) {
    const int32_t before = plan.ctas_per_row;
    check(input.forced_ctas == 0, "ctas_per_row: wanted a cluster size that the ", target.context.sm_count,
          " SMs of the stream's context can run, got ", before);
    input.max_ctas = before / 2;
    plan = make_plan(input);
    check(plan.ctas_per_row < before, "logits: wanted a stream whose context can run clusters of ", before,
          " CTAs, which ", params.width, " columns need, got one of ", target.context.sm_count, " SMs");
  }
  return plan;
}

// The plan's input for the rows of a call, of which `input` says what the rows alone do not.
inline PlanInput on_gpu(PlanInput input, const TopkParams& params, const CallTarget& target) {
  input.sm_count = target.context.sm_count;
  input.arch = target.arch;
  const int64_t stride = params.logits_stride * element_bytes(params.dtype);
  input.lead = lead_of_rows(are_aligned(params.logits, params.rows, stride), params.dtype);
  return input;
}

// Launches the decode kernels.
inline void launch_decode(const TopkParams& params, const PlanInput& input, const CallTarget& target,
                          bool pdl) {
  const Plan plan = runnable_plan(params, input, target);
  const cudaError_t status = launch(params, plan, pdl, target.stream);
  require(status == cudaSuccess, "gvr_topk: launch of ", plan.ctas_per_row, " CTAs per row on ",
          target.context.sm_count, " SMs failed: ", cudaGetErrorString(status));
}

// An empty tensor has a null address, which would mean that there is no page table. No page of an empty table
// is read, so any address that is not null will do.
inline const int32_t* page_pointer(const OptionalTensor& page_table, const void* other) {
  const auto* pages = pointer<const int32_t>(page_table);
  return page_table && pages == nullptr ? static_cast<const int32_t*>(other) : pages;
}

}  // namespace gvr_topk
