// Launches the kernel of blocks, for every dtype.
#include <algorithm>

#include "blocks/kernel.cuh"
#include "core/launch.cuh"

namespace gvr_topk::blocks {

template <typename T>
cudaError_t launch(const BlocksParams& params, const LaunchTarget& target) {
  const int64_t selected = std::min<int64_t>(params.topk.k, int64_t{params.block_k} * kBlockScores);
  const LaunchConfig config(dim3(params.topk.rows), dim3(kThreads), blocks_bytes(selected), 1, target);
  Plan plan{};
  plan.path = Path::kNoHint;
  plan.ctas_per_row = 1;
  const LaunchTraits traits = describe_launch<T>(params.topk, plan);
  if (params.given != nullptr) return launch_kernel<blocks_topk<T, true>>(config, traits, params);
  return launch_kernel<blocks_topk<T, false>>(config, traits, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const BlocksParams&, const LaunchTarget&);

}  // namespace gvr_topk::blocks
