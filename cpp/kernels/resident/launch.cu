// Launches the resident kernel, for every dtype.
#include "cluster/launch.cuh"
#include "resident/kernel.cuh"

namespace gvr_topk::resident {

// The specialization of a launch. With other than the common sizes, there are only kCommon and kGeneric.
inline Specialization specialization_of(const LaunchTraits& traits) {
  const Specialization which = traits.specialization();
  if (traits.has_common_sizes() || which == Specialization::kGeneric) return which;
  return which == Specialization::kNoState ? Specialization::kGeneric : Specialization::kCommon;
}

template <typename T, int kValues>
cudaError_t launch_tile(const ClusterLaunch& launch) {
  const size_t shared = resident_bytes<T, kValues>(launch.traits);
  return launch_as_constant<Specialization::kCommonOneRow, Specialization::kCommonSlotted,
                            Specialization::kCommon, Specialization::kNoState, Specialization::kGeneric>(
      specialization_of(launch.traits), [&](auto specialization) {
        return launch_clusters<resident_topk<T, kValues, specialization()>>(launch, shared);
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
