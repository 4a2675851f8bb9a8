// Launches the streaming kernel, for every dtype.
#include "cluster/launch.cuh"
#include "streaming/kernel.cuh"

namespace gvr_topk::streaming {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const ClusterLaunch launch = make_cluster_launch<T>(params, plan, target);
  const size_t shared = streaming_bytes(launch.traits);
  using S = Specialization;
  return launch_as_constant<S::kGeneric, S::kNoState, S::kAnyRow, S::kCommon>(
      launch.traits.specialization(), [&](auto specialization) {
        return launch_clusters<streaming_topk<T, specialization()>>(launch, shared);
      });
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::streaming
