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

// Elements a thread of the resident kernel would hold.
inline int values_per_thread(const TopkParams& params, const Plan& plan) {
  return (params.width + plan.ctas_per_row * kThreads - 1) / (plan.ctas_per_row * kThreads);
}

// Whether the stream kernel's pools have room for the k selected and a wide bracket, wherever they lie.
constexpr int64_t kWideBracket = 2048;
inline bool pools_suffice(const TopkParams& params, const Plan& plan, const Shape& shape) {
  return params.k + kWideBracket <= int64_t{32} * shape.pool_chunks;
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t queue) {
  static KernelLimits general, resident, wide, stream;
  const Shape shape = make_shape(plan, plan.path == Path::kCluster);
  const int values = values_per_thread(params, plan);
  if (values <= 16) {
    return launch_kernel<T>(resident, resident_topk<T, 16>, resident_bytes<T, 16>(shape), params, plan, shape,
                            pdl, queue);
  }
  if (values <= 32 && shape.ring) {
    return launch_kernel<T>(wide, resident_topk<T, 32>, resident_bytes<T, 32>(shape), params, plan, shape, pdl,
                            queue);
  }
  if (shape.ring && pools_suffice(params, plan, shape)) {
    return launch_kernel<T>(stream, stream_topk<T>, stream_bytes(shape), params, plan, shape, pdl, queue);
  }
  return launch_kernel<T>(general, cluster_topk<T>, shared_bytes(shape), params, plan, shape, pdl, queue);
}

}  // namespace gvr_topk::cluster
