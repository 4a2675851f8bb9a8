// Launches the sampler, for every dtype.
#include <algorithm>

#include "core/launch.cuh"
#include "sampling/kernel.cuh"

namespace gvr_topk::sampling {

template <typename T>
cudaError_t launch(const SampleParams& params, const SamplePlan& plan, const LaunchTarget& target) {
  const auto config = [&](int teams) {
    return LaunchConfig(dim3(teams * plan.ctas), dim3(kThreads), plan.shared_bytes, plan.ctas, target);
  };
  if (params.pending == nullptr || !params.one_kind)
    return launch_kernel<sample_rows<T>>(config(params.rows), params);
  constexpr int kMostCtas = 384;  // about as many as an H100 runs at once
  return launch_kernel<sample_pending_rows<T>>(config(std::min(params.rows, kMostCtas / plan.ctas)), params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const SampleParams&, const SamplePlan&, const LaunchTarget&);

}  // namespace gvr_topk::sampling
