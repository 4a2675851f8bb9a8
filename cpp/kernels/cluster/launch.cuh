// Launches the cluster kernel of a plan.
#pragma once

#include "cluster/resident.cuh"
#include "cluster/stream.cuh"
#include "common/launch.cuh"

namespace gvr_topk::cluster {

template <typename Kernel>
cudaError_t launch_kernel(KernelLimits& limits, Kernel* kernel, size_t shared, const TopkParams& params,
                          const Plan& plan, const Shape& shape, bool pdl, cudaStream_t stream) {
  const cudaError_t status = limits.raise(reinterpret_cast<const void*>(kernel));
  if (status != cudaSuccess) return status;
  LaunchConfig launch(dim3(params.rows * plan.ctas_per_row), dim3(kThreads), shared, stream,
                      plan.ctas_per_row, pdl);
  return cudaLaunchKernelEx(&launch.config, kernel, shape, params);
}

// What the kernels need not find out for every row.
template <typename T>
Shape describe(const TopkParams& params, const Plan& plan) {
  Shape shape = make_shape(plan, plan.path == Path::kCluster);
  constexpr int kLaneElements = kPerVec<T> * kThreads;
  const int step = kLaneElements * plan.ctas_per_row;
  shape.vecs = (params.width + step - 1) / step;
  const auto base = reinterpret_cast<uintptr_t>(params.logits);
  const bool strides = params.rows == 1 || params.logits_stride % kPerVec<T> == 0;
  shape.aligned = base % sizeof(uint4) == 0 && strides && params.width >= 2 * kNeighbours;
  shape.whole = shape.aligned && params.width % kPerVec<T> == 0;
  shape.fed = shape.use_hint && shape.aligned && params.guess_state != nullptr && params.prior != nullptr;
  shape.prompt = shape.fed && params.row_slot == nullptr && params.rows <= params.num_slots * params.next_n;
  shape.contested = params.next_n > 1 || params.row_slot != nullptr;
  return shape;
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream) {
  static KernelLimits resident, wide, streaming, general;
  const Shape shape = describe<T>(params, plan);
  if (plan.family == Family::kStream) {
    return launch_kernel(streaming, stream_topk<T>, stream_bytes(shape), params, plan, shape, pdl, stream);
  }
  if (plan.family == Family::kGeneral) {
    return launch_kernel(general, general_topk<T>, shared_bytes(shape), params, plan, shape, pdl, stream);
  }
  if (plan.values_per_thread == kValuesPerThread) {
    constexpr int kValues = kValuesPerThread;
    return launch_kernel(resident, resident_topk<T, kValues>, resident_bytes<T, kValues>(shape), params, plan,
                         shape, pdl, stream);
  }
  constexpr int kValues = kWideValuesPerThread;
  return launch_kernel(wide, resident_topk<T, kValues>, resident_bytes<T, kValues>(shape), params, plan,
                       shape, pdl, stream);
}

}  // namespace gvr_topk::cluster
