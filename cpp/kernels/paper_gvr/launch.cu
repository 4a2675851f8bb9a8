// Launches the paper's kernel, for every dtype.
#include "core/launch.cuh"
#include "paper_gvr/kernel.cuh"

namespace gvr_topk::paper_gvr {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const LaunchTraits traits = describe_launch<T>(params, plan);
  const SmemLayout layout = make_layout(plan);
  const LaunchConfig config(dim3(params.rows), dim3(kThreads), block_bytes(traits, layout), 1, target);
  return launch_kernel<paper_gvr_topk<T>>(config, traits, params, layout);
}

template cudaError_t launch<float>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const TopkParams&, const Plan&, const LaunchTarget&);
template cudaError_t launch<__half>(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::paper_gvr
