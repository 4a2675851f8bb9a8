// Launches the sampler, for every dtype.
#include "core/launch.cuh"
#include "sampling/kernel.cuh"

namespace gvr_topk::sampling {

template <typename T>
cudaError_t launch(const SampleParams& params, const SamplePlan& plan, const LaunchTarget& target) {
  const LaunchConfig config(dim3(params.rows * plan.ctas), dim3(kThreads), plan.shared_bytes, plan.ctas,
                            target);
  return launch_kernel<sample_rows<T>>(config, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const SampleParams&, const SamplePlan&, const LaunchTarget&);

}  // namespace gvr_topk::sampling
