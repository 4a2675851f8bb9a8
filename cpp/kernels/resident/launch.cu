// Launches the resident kernel, for every dtype.
#include "cluster/launch.cuh"
#include "resident/kernel.cuh"

namespace gvr_topk::resident {

template <typename T, int kValues>
cudaError_t launch_tile(const ClusterLaunch& launch) {
  using S = Specialization;
  const size_t shared = resident_bytes<T, kValues>(launch.traits);
  const S which = launch.traits.specialization();
  if (launch.traits.has_common_sizes() && which != S::kCommon && which != S::kGeneric) {
    return launch_as_constant<S::kCommonOneRow, S::kCommonSlotted, S::kNoState, S::kAnyRow>(
        which, [&](auto specialization) {
          return launch_clusters<resident_topk<T, kValues, specialization(), true>>(launch, shared);
        });
  }
  const S any_sizes = which == S::kCommonOneRow || which == S::kCommonSlotted ? S::kCommon : which;
  return launch_as_constant<S::kCommon, S::kNoState, S::kAnyRow, S::kGeneric>(
      any_sizes, [&](auto specialization) {
        return launch_clusters<resident_topk<T, kValues, specialization(), false>>(launch, shared);
      });
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const ClusterLaunch launch = make_cluster_launch<T>(params, plan, target);
  const bool wide = plan.values_per_thread > kValuesPerThread;
  return wide ? launch_tile<T, kWideValuesPerThread>(launch) : launch_tile<T, kValuesPerThread>(launch);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::resident
