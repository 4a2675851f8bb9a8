// Chooses the kernel family of a plan and its instantiation for a dtype.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/launch.cuh"
#include "gvr_topk/launch.h"

namespace gvr_topk {

namespace cluster {
template <typename T>
cudaError_t launch(const TopkParams&, const Plan&, const LaunchTarget&);
}  // namespace cluster

namespace gvr {
template <typename T>
cudaError_t launch(const TopkParams&, const Plan&, const LaunchTarget&);
}  // namespace gvr

namespace single {
template <typename T>
cudaError_t launch(const TopkParams&, const Plan&, const LaunchTarget&);
}  // namespace single

namespace {

template <typename T>
cudaError_t launch_as(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  if (plan.family == Family::kFourPhase) return gvr::launch<T>(params, plan, target);
  if (plan.family == Family::kSingle) return single::launch<T>(params, plan, target);
  return cluster::launch<T>(params, plan, target);
}

cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  switch (params.dtype) {
    case Dtype::kFloat32:
      return launch_as<float>(params, plan, target);
    case Dtype::kBfloat16:
      return launch_as<__nv_bfloat16>(params, plan, target);
    case Dtype::kFloat16:
      return launch_as<__half>(params, plan, target);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  return launch(params, plan, LaunchTarget{stream, pdl, nullptr});
}

cudaError_t max_active_clusters(const TopkParams& params, const Plan& plan, cudaStream_t stream,
                                int* clusters) {
  return launch(params, plan, LaunchTarget{stream, false, clusters});
}

}  // namespace gvr_topk
