// Launches the kernel of short rows.
#pragma once

#include "common/launch.cuh"
#include "single/kernel.cuh"

namespace gvr_topk::single {

template <typename T, int kValues>
cudaError_t launch_holding(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const LaunchConfig launch(dim3(params.rows), dim3(kThreads), single_bytes(plan.staged), 1, target);
  const Shape shape = describe<T>(params, plan);
  const Known known = shape.has(Shape::kQuads) ? shape.known() : Known::kNothing;
  if (known == Known::kPlain) {
    return launch_kernel<single_topk<T, kValues, Known::kPlain>>(launch, shape, params, plan.path);
  }
  if (known == Known::kSlotted) {
    return launch_kernel<single_topk<T, kValues, Known::kSlotted>>(launch, shape, params, plan.path);
  }
  if (known == Known::kBare) {
    return launch_kernel<single_topk<T, kValues, Known::kBare>>(launch, shape, params, plan.path);
  }
  return launch_kernel<single_topk<T, kValues, Known::kNothing>>(launch, shape, params, plan.path);
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  if (plan.values_per_thread == kFewValuesPerThread) {
    return launch_holding<T, kFewValuesPerThread>(params, plan, target);
  }
  if (plan.values_per_thread == kValuesPerThread) {
    return launch_holding<T, kValuesPerThread>(params, plan, target);
  }
  if (plan.values_per_thread == kWideValuesPerThread) {
    return launch_holding<T, kWideValuesPerThread>(params, plan, target);
  }
  return launch_holding<T, kMostValuesPerThread>(params, plan, target);
}

}  // namespace gvr_topk::single
