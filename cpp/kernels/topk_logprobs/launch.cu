// Launches the kernel that ranks the largest values of each row, for every dtype.
#include "core/launch.cuh"
#include "topk_logprobs/kernel.cuh"

namespace gvr_topk::topk_logprobs {

template <typename T>
cudaError_t launch(const TopkLogprobsParams& params, const SamplePlan& plan, const LaunchTarget& target) {
  const LaunchConfig config(dim3(params.row.rows * plan.ctas), dim3(kThreads), plan.shared_bytes, plan.ctas,
                            target);
  return launch_kernel<rank_rows<T>>(config, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkLogprobsParams&, const SamplePlan&, const LaunchTarget&);

}  // namespace gvr_topk::topk_logprobs
