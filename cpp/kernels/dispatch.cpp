// Chooses the kernel family of a plan and its instantiation for a dtype.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gvr_topk/launch.h"

namespace gvr_topk {

namespace cluster {
template <typename T>
cudaError_t launch(const TopkParams&, const Plan&, bool, cudaStream_t);
}  // namespace cluster

namespace gvr {
template <typename T>
cudaError_t launch(const TopkParams&, const Plan&, bool, cudaStream_t);
}  // namespace gvr

namespace single {
template <typename T>
cudaError_t launch(const TopkParams&, const Plan&, bool, cudaStream_t);
}  // namespace single

namespace {

template <typename T>
cudaError_t launch_as(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  if (plan.family == Family::kFourPhase) return gvr::launch<T>(params, plan, pdl, stream);
  if (plan.family == Family::kSingle) return single::launch<T>(params, plan, pdl, stream);
  return cluster::launch<T>(params, plan, pdl, stream);
}

}  // namespace

cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  switch (params.dtype) {
    case Dtype::kFloat32:
      return launch_as<float>(params, plan, pdl, stream);
    case Dtype::kBfloat16:
      return launch_as<__nv_bfloat16>(params, plan, pdl, stream);
    case Dtype::kFloat16:
      return launch_as<__half>(params, plan, pdl, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gvr_topk
