// Launches the kernel of short rows, for every dtype.
#include "core/launch.cuh"
#include "small_row/kernel.cuh"

namespace gvr_topk::small_row {

template <typename T, int kValues>
cudaError_t launch_tile(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const LaunchConfig config(dim3(params.rows), dim3(kThreads), small_row_bytes(plan.staged), 1, target);
  const LaunchTraits traits = describe_launch<T>(params, plan);
  // Every specialized kernel writes whole vectors of results.
  const Specialization which =
      traits.has(LaunchTraits::kVectorStores) ? traits.specialization() : Specialization::kGeneric;
  using S = Specialization;
  return launch_as_constant<S::kCommonOneRow, S::kCommonSlotted, S::kNoState, S::kAnyRow, S::kGeneric>(
      which, [&](auto specialization) {
        return launch_kernel<small_row_topk<T, kValues, specialization()>>(config, traits, params);
      });
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  return launch_as_constant<kMinValuesPerThread, kValuesPerThread, kWideValuesPerThread, kMaxValuesPerThread>(
      plan.values_per_thread, [&](auto values) { return launch_tile<T, values()>(params, plan, target); });
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::small_row
