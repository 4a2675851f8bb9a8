// Chooses the instantiation of the cluster kernel for a dtype.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gvr_topk/launch.h"

namespace gvr_topk {

namespace cluster {
template <typename T>
cudaError_t launch(const TopkParams&, const Plan&, bool, bool, cudaStream_t);
}  // namespace cluster

cudaError_t launch_cluster(const TopkParams& params, const Plan& plan, bool use_guess, bool pdl,
                           cudaStream_t stream) {
  switch (params.dtype) {
    case Dtype::kFloat32:
      return cluster::launch<float>(params, plan, use_guess, pdl, stream);
    case Dtype::kBfloat16:
      return cluster::launch<__nv_bfloat16>(params, plan, use_guess, pdl, stream);
    case Dtype::kFloat16:
      return cluster::launch<__half>(params, plan, use_guess, pdl, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gvr_topk
