// Launches the fallback kernel, for every dtype.
#include "cluster/launch.cuh"
#include "fallback/kernel.cuh"

namespace gvr_topk::fallback {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const ClusterLaunch launch = make_cluster_launch<T>(params, plan, target);
  return launch_clusters<fallback_topk<T>>(launch, shared_bytes(launch.traits, launch.layout));
}

template cudaError_t launch<float>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__half>(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::fallback
