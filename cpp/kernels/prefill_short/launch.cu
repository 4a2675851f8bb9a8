// Launches the prefill kernel of short rows, for every dtype.
#include "prefill_short/kernel.cuh"

namespace gvr_topk::prefill_short {

template <typename T, int kValues>
cudaError_t launch_tile(const PrefillParams& params, const PrefillPlan& plan, const LaunchTarget& target) {
  const size_t bytes = sizeof(RowsShared) + staged_bytes(params) + Arrivals<T, kValues>::kAllBytes;
  const LaunchConfig config(dim3(plan.ctas), dim3(kThreads), bytes, 1, target);
  return launch_kernel<prefill_short_topk<T, kValues>>(config, params);
}

template <typename T>
cudaError_t launch(const PrefillParams& params, const PrefillPlan& plan, const LaunchTarget& target) {
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

template cudaError_t launch<float>(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);
template cudaError_t launch<__half>(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);

}  // namespace gvr_topk::prefill_short
