// Launches the cluster kernel of a plan.
#pragma once

#include "cluster/resident.cuh"
#include "cluster/stream.cuh"
#include "common/launch.cuh"

namespace gvr_topk::cluster {

template <typename Kernel>
cudaError_t launch_kernel(KernelLimits& limits, Kernel* kernel, size_t shared, const TopkParams& params,
                          const Plan& plan, const Shape& shape, const Room& room, bool pdl,
                          cudaStream_t stream) {
  const cudaError_t status = limits.raise(reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  LaunchConfig launch(dim3(params.rows * plan.ctas_per_row), dim3(kThreads), shared, stream,
                      plan.ctas_per_row, pdl);
  return cudaLaunchKernelEx(&launch.config, kernel, shape, params, room);
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  static KernelLimits resident, wide, streaming, streaming_few, general;
  const Shape shape = describe<T>(params, plan);
  const Room room = make_room(plan);
  if (plan.family == Family::kStream) {
    const size_t shared = stream_bytes(shape, room);
    // The brackets of few CTAs hold most, and a larger sample makes them narrower.
    if (shape.log2_ctas() < kLog2FewCtas) {
      return launch_kernel(streaming_few, stream_topk<T, kMostLooks>, shared, params, plan, shape, room, pdl,
                           stream);
    }
    return launch_kernel(streaming, stream_topk<T, 1>, shared, params, plan, shape, room, pdl, stream);
  }
  if (plan.family == Family::kGeneral) {
    return launch_kernel(general, general_topk<T>, shared_bytes(shape, room), params, plan, shape, room, pdl,
                         stream);
  }
  if (plan.values_per_thread == kValuesPerThread) {
    constexpr int kValues = kValuesPerThread;
    return launch_kernel(resident, resident_topk<T, kValues>, resident_bytes<T, kValues>(shape, room), params,
                         plan, shape, room, pdl, stream);
  }
  constexpr int kValues = kWideValuesPerThread;
  return launch_kernel(wide, resident_topk<T, kValues>, resident_bytes<T, kValues>(shape, room), params, plan,
                       shape, room, pdl, stream);
}

}  // namespace gvr_topk::cluster
