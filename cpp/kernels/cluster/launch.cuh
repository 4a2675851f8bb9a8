// Launches kernels in which a cluster of CTAs shares each row.
#pragma once

#include "cluster/smem_layout.cuh"
#include "core/launch.cuh"

namespace gvr_topk {

// Everything that the host needs for one launch.
struct ClusterLaunch {
  const TopkParams& params;
  const Plan& plan;
  LaunchTraits traits;
  const LaunchTarget& target;
};

template <typename T>
ClusterLaunch make_cluster_launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  return ClusterLaunch{params, plan, describe_launch<T>(params, plan), target};
}

// The grid is rows * ctas CTAs of kThreads threads, in clusters of `ctas`.
template <auto kKernel>
cudaError_t launch_clusters(const ClusterLaunch& launch, size_t shared) {
  const int ctas = launch.plan.ctas_per_row;
  const LaunchConfig config(dim3(launch.params.rows * ctas), dim3(kThreads), shared, ctas, launch.target);
  return launch_kernel<kKernel>(config, launch.traits, launch.params);
}

}  // namespace gvr_topk
