// Launches the prefill kernel of short rows, for every dtype.
#include "prefill_short/kernel.cuh"

namespace gvr_topk::prefill_short {

template <typename T, int kBlockThreads>
cudaError_t launch_block(const PrefillParams& params, const PrefillPlan& plan, const LaunchTarget& target) {
  const size_t bytes =
      sizeof(RowsShared<kBlockThreads>) + staged_bytes(params) + Arrivals<T, kBlockThreads>::kAllBytes;
  const LaunchConfig config(dim3(plan.ctas), dim3(kBlockThreads), bytes, 1, target);
  return launch_kernel<prefill_short_topk<T, kBlockThreads>>(config, params);
}

template <typename T>
cudaError_t launch(const PrefillParams& params, const PrefillPlan& plan, const LaunchTarget& target) {
  switch (plan.threads) {
    case 128:
      return launch_block<T, 128>(params, plan, target);
    case 256:
      return launch_block<T, 256>(params, plan, target);
    default:
      return launch_block<T, 512>(params, plan, target);
  }
}

template cudaError_t launch<float>(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);
template cudaError_t launch<__half>(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);

}  // namespace gvr_topk::prefill_short
