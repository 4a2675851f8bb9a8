// Launches the kernel that accepts drafts.
#include "core/launch.cuh"
#include "gvr_topk/launch.h"
#include "verify/kernel.cuh"

namespace gvr_topk {

cudaError_t launch_verify(const VerifyParams& params, cudaStream_t stream) {
  const LaunchConfig config(dim3(params.requests), dim3(32), 0, 1, {stream, true, nullptr});
  return launch_kernel<verify::accept_drafts>(config, params);
}

}  // namespace gvr_topk
