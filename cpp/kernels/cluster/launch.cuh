// Launches one instantiation of the cluster kernel.
#pragma once

#include "cluster/kernel.cuh"
#include "common/launch.cuh"

namespace gvr_topk::cluster {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  static KernelLimits limits;
  const cudaError_t status = limits.raise(reinterpret_cast<const void*>(cluster_topk<T>));
  if (status != cudaSuccess) return status;
  const Shape shape = make_shape(plan, plan.path == Path::kCluster);
  LaunchConfig launch(dim3(params.rows * plan.ctas_per_row), dim3(kThreads), shared_bytes(shape), stream,
                      plan.ctas_per_row, pdl);
  return cudaLaunchKernelEx(&launch.config, cluster_topk<T>, params, shape);
}

}  // namespace gvr_topk::cluster
