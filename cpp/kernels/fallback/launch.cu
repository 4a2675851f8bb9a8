// Launches the fallback kernel, for every dtype.
#include "cluster/launch.cuh"
#include "fallback/kernel.cuh"

namespace gvr_topk::fallback {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const ClusterLaunch launch = make_cluster_launch<T>(params, plan, target);
  return launch_clusters<fallback_topk<T>>(launch, fallback_bytes(launch.traits, plan.ring_depth));
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::fallback
