// Launches the streaming kernel, for every dtype.
#include "cluster/launch.cuh"
#include "streaming/kernel.cuh"

namespace gvr_topk::streaming {

template <typename T, int kProbes>
cudaError_t launch_probing(const ClusterLaunch& launch) {
  const size_t shared = streaming_bytes(launch.traits, launch.layout);
  switch (launch.traits.specialization()) {
    case Specialization::kGeneric:
      return launch_clusters<streaming_topk<T, kProbes, Specialization::kGeneric>>(launch, shared);
    case Specialization::kNoState:
      return launch_clusters<streaming_topk<T, kProbes, Specialization::kNoState>>(launch, shared);
    default:
      return launch_clusters<streaming_topk<T, kProbes, Specialization::kCommon>>(launch, shared);
  }
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const ClusterLaunch launch = make_cluster_launch<T>(params, plan, target);
  // With few CTAs each interval holds most elements, and a larger sample makes it narrower.
  const bool few_ctas = launch.traits.log2_ctas() < kLog2FewCtas;
  return few_ctas ? launch_probing<T, kMaxProbes>(launch) : launch_probing<T, 1>(launch);
}

template cudaError_t launch<float>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__half>(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::streaming
