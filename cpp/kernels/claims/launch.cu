// Launches the kernel that claims slots.
#include "claims/kernel.cuh"
#include "core/launch.cuh"

namespace gvr_topk::claims {

// The launch waits for the kernel before it, which may be writing the same slots.
cudaError_t launch(const TopkParams& params, cudaStream_t stream) {
  const LaunchTarget target{stream, false, nullptr};
  return launch_kernel<claim_slots>(LaunchConfig(dim3(1), dim3(kClaimThreads), 0, 1, target), params);
}

}  // namespace gvr_topk::claims
