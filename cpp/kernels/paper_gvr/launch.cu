// Launches the paper's kernel, for every dtype.
#include <algorithm>

#include "core/launch.cuh"
#include "paper_gvr/kernel.cuh"

namespace gvr_topk::paper_gvr {

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, const LaunchTarget& target) {
  Plan of_rounds = plan;  // for the rows that the kernel's search gives up on
  of_rounds.ring_depth = 0;
  LaunchTraits traits = describe_launch<T>(params, of_rounds);
  // Rows of any alignment are hinted, because the kernel reads from the 16-byte boundary before the row.
  traits.flags |= LaunchTraits::kAligned;
  if (params.state != nullptr) traits.flags |= LaunchTraits::kReadsState;
  const SmemLayout layout = make_layout(of_rounds);
  const size_t bytes = std::max(sizeof(PaperShared), shared_bytes(traits, layout));
  const LaunchConfig config(dim3(params.rows), dim3(kThreads), bytes, 1, target);
  return launch_kernel<paper_gvr_topk<T>>(config, traits, params, layout);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::paper_gvr
