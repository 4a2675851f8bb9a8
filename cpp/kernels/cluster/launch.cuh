// Launches one instantiation of the cluster kernel.
#pragma once

#include "cluster/resident.cuh"
#include "cluster/stream.cuh"
#include "common/launch.cuh"

namespace gvr_topk::cluster {

template <typename T, typename Kernel>
cudaError_t launch_kernel(KernelLimits& limits, Kernel* kernel, size_t shared, const TopkParams& params,
                          const Plan& plan, const Shape& shape, bool pdl, cudaStream_t queue) {
  const cudaError_t status = limits.raise(reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  LaunchConfig launch(dim3(params.rows * plan.ctas_per_row), dim3(kThreads), shared, queue, plan.ctas_per_row,
                      pdl);
  return cudaLaunchKernelEx(&launch.config, kernel, params, shape);
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t queue) {
  static KernelLimits general, resident, stream;
  const Shape shape = make_shape(plan, plan.path == Path::kCluster);
  if (shape.use_guess && shape.masks == 0) {
    return launch_kernel<T>(resident, resident_topk<T>, resident_bytes<T>(shape), params, plan, shape, pdl,
                            queue);
  }
  if (shape.use_guess && shape.ring) {
    return launch_kernel<T>(stream, stream_topk<T>, stream_bytes(shape), params, plan, shape, pdl, queue);
  }
  return launch_kernel<T>(general, cluster_topk<T>, shared_bytes(shape), params, plan, shape, pdl, queue);
}

}  // namespace gvr_topk::cluster
