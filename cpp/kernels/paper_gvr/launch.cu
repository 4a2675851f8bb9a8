// Launches the paper's kernel, for every dtype.
#include <algorithm>

#include "core/launch.cuh"
#include "paper_gvr/kernel.cuh"

namespace gvr_topk::paper_gvr {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  const LaunchTraits traits = describe_launch<T>(params, plan);
  // The bitmap ends with the buffer's width, because loads take longer where an SM's cache is small.
  const size_t own =
      offsetof(PaperShared, bitmap) + PaperStream<float>::padded(params.width + kMaxLineLead) / 8;
  const size_t bytes = std::max(own, fallback_bytes(traits, plan.ring_depth));
  const LaunchConfig config(dim3(params.rows), dim3(kThreads), bytes, 1, target);
  return launch_kernel<paper_gvr_topk<T>>(config, traits, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::paper_gvr
