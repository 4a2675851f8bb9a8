// Launches one instantiation of the four-phase kernel.
#pragma once

#include "common/launch.cuh"
#include "gvr/kernel.cuh"

namespace gvr_topk::gvr {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const cluster::Shape shape = cluster::describe<T>(params, plan);
  const cluster::Room room = cluster::make_room(plan);
  const LaunchConfig launch(dim3(params.rows), dim3(kThreads), block_bytes(shape, room), 1, target);
  return launch_kernel<four_phase_topk<T>>(launch, shape, params, room);
}

}  // namespace gvr_topk::gvr
