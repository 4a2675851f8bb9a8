// Launches one instantiation of the four-phase kernel.
#pragma once

#include "common/launch.cuh"
#include "gvr/kernel.cuh"

namespace gvr_topk::gvr {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  static KernelLimits limits;
  const cudaError_t status = limits.raise(reinterpret_cast<const void*>(four_phase_topk<T>));
  if (status != cudaSuccess) return status;
  const cluster::Shape shape = cluster::describe<T>(params, plan);
  const cluster::Room room = cluster::make_room(plan);
  LaunchConfig launch(dim3(params.rows), dim3(kThreads), block_bytes(shape, room), stream, 1, pdl);
  return cudaLaunchKernelEx(&launch.config, four_phase_topk<T>, shape, params, room);
}

}  // namespace gvr_topk::gvr
