// Launches the streaming kernel, for every dtype.
#include "cluster/launch.cuh"
#include "streaming/kernel.cuh"

namespace gvr_topk::streaming {

template <typename T, int kProbes>
cudaError_t launch_probing(const ClusterLaunch& launch) {
  const size_t shared = streaming_bytes(launch.traits);
  using S = Specialization;
  return launch_as_constant<S::kGeneric, S::kNoState, S::kAnyRow, S::kCommon>(
      launch.traits.specialization(), [&](auto specialization) {
        return launch_clusters<streaming_topk<T, kProbes, specialization()>>(launch, shared);
      });
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const ClusterLaunch launch = make_cluster_launch<T>(params, plan, target);
  // With few CTAs each interval holds most elements, and a larger sample makes it narrower.
  const bool few_ctas = launch.traits.log2_ctas() < kLog2FewCtas;
  return few_ctas ? launch_probing<T, kMaxProbes>(launch) : launch_probing<T, 1>(launch);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::streaming
