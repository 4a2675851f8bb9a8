// Launches the cluster kernel of a plan.
#pragma once

#include "cluster/resident.cuh"
#include "cluster/stream.cuh"
#include "common/launch.cuh"

namespace gvr_topk::cluster {

// What all launches of this family take.
struct Launch {
  const TopkParams& params;
  const Plan& plan;
  Shape shape;
  Room room;
  const LaunchTarget& target;
};

template <auto kKernel>
cudaError_t launch_clusters(const Launch& its, size_t shared) {
  const LaunchConfig launch(dim3(its.params.rows * its.plan.ctas_per_row), dim3(kThreads), shared,
                            its.plan.ctas_per_row, its.target);
  return launch_kernel<kKernel>(launch, its.shape, its.params, its.room);
}

template <typename T, int kValues>
cudaError_t launch_resident(const Launch& its) {
  const size_t shared = resident_bytes<T, kValues>(its.shape, its.room);
  const Known known = its.shape.has_usual_sizes() ? its.shape.known() : Known::kNothing;
  if (known == Known::kPlain) return launch_clusters<resident_topk<T, kValues, Known::kPlain>>(its, shared);
  if (known == Known::kSlotted)
    return launch_clusters<resident_topk<T, kValues, Known::kSlotted>>(its, shared);
  if (known == Known::kUsual) return launch_clusters<resident_topk<T, kValues, Known::kUsual>>(its, shared);
  if (known == Known::kBare) return launch_clusters<resident_topk<T, kValues, Known::kBare>>(its, shared);
  return launch_clusters<resident_topk<T, kValues, Known::kNothing>>(its, shared);
}

template <typename T, int kLooks>
cudaError_t launch_stream(const Launch& its) {
  const size_t shared = stream_bytes(its.shape, its.room);
  const Known known = its.shape.known();
  if (known == Known::kNothing) return launch_clusters<stream_topk<T, kLooks, Known::kNothing>>(its, shared);
  if (known == Known::kBare) return launch_clusters<stream_topk<T, kLooks, Known::kBare>>(its, shared);
  return launch_clusters<stream_topk<T, kLooks, Known::kUsual>>(its, shared);
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const Launch its{params, plan, describe<T>(params, plan), make_room(plan), target};
  const bool streams = plan.family == Family::kStream && its.shape.has(Shape::kAligned);
  if (plan.family != Family::kResident && !streams) {
    return launch_clusters<general_topk<T>>(its, shared_bytes(its.shape, its.room));
  }
  if (plan.family == Family::kResident) {
    const bool wide = plan.values_per_thread > kValuesPerThread;
    return wide ? launch_resident<T, kWideValuesPerThread>(its) : launch_resident<T, kValuesPerThread>(its);
  }
  // The brackets of few CTAs hold most, and a larger sample makes them narrower.
  const bool few = its.shape.log2_ctas() < kLog2FewCtas;
  return few ? launch_stream<T, kMostLooks>(its) : launch_stream<T, 1>(its);
}

}  // namespace gvr_topk::cluster
