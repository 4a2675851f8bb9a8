// Launches the prefill kernel, for every dtype.
#include "prefill/kernel.cuh"

namespace gvr_topk::prefill {

template <typename T>
cudaError_t launch(const PrefillParams& params, const PrefillPlan& plan, const LaunchTarget& target) {
  const LaunchConfig config(dim3(plan.ctas), dim3(kBlockThreads), shared_bytes(params.bitmap_pairs), 1,
                            target);
  return launch_kernel<prefill_topk<T>>(config, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const PrefillParams&, const PrefillPlan&, const LaunchTarget&);

}  // namespace gvr_topk::prefill
