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
  return launch_as_constant<128, 256, 512>(
      plan.threads, [&](auto threads) { return launch_block<T, threads()>(params, plan, target); });
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);

}  // namespace gvr_topk::prefill_short
