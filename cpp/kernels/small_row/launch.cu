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
  const auto launch_as = [&](auto specialized) {
    return launch_kernel<small_row_topk<T, kValues, specialized()>>(config, traits, params);
  };
  using std::integral_constant;
  switch (which) {
    case Specialization::kCommonOneRow:
      return launch_as(integral_constant<Specialization, Specialization::kCommonOneRow>{});
    case Specialization::kCommonSlotted:
      return launch_as(integral_constant<Specialization, Specialization::kCommonSlotted>{});
    case Specialization::kNoState:
      return launch_as(integral_constant<Specialization, Specialization::kNoState>{});
    default:
      return launch_as(integral_constant<Specialization, Specialization::kGeneric>{});
  }
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  switch (plan.values_per_thread) {
    case kMinValuesPerThread:
      return launch_tile<T, kMinValuesPerThread>(params, plan, target);
    case kValuesPerThread:
      return launch_tile<T, kValuesPerThread>(params, plan, target);
    case kWideValuesPerThread:
      return launch_tile<T, kWideValuesPerThread>(params, plan, target);
    default:
      return launch_tile<T, kMaxValuesPerThread>(params, plan, target);
  }
}

template cudaError_t launch<float>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__half>(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::small_row
