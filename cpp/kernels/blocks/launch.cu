// Launches the kernels of blocks, for every dtype.
#include <algorithm>

#include "blocks/block_values.cuh"
#include "blocks/kernel.cuh"
#include "core/launch.cuh"

namespace gvr_topk::blocks {

// CTAs of a launch that writes values, unless there are more rows: twice as many as an H100 runs at once.
constexpr int kValueCtas = 1024;

template <typename T>
cudaError_t launch(const BlocksParams& params, const LaunchTarget& target) {
  const int64_t selected = std::min<int64_t>(params.topk.k, int64_t{params.block_k} * kBlockScores);
  const LaunchConfig config(dim3(params.topk.rows), dim3(kThreads), blocks_bytes(selected), 1, target);
  Plan plan{};
  plan.path = Path::kNoHint;
  plan.ctas_per_row = 1;
  LaunchTraits traits = describe_launch<T>(params.topk, plan);
  if (params.row_starts != nullptr) traits.flags |= LaunchTraits::kRowStarts;
  if (params.values != nullptr) {
    const int64_t runs = (params.values_stride + kThreads - 1) / kThreads;
    const int64_t parts = std::clamp<int64_t>(kValueCtas / params.topk.rows, 1, runs);
    const LaunchConfig every_part(dim3(params.topk.rows, parts), dim3(kThreads), sizeof(RowShared), 1,
                                  target);
    return launch_kernel<block_values<T>>(every_part, traits, params);
  }
  if (params.given != nullptr) return launch_kernel<blocks_topk<T, true>>(config, traits, params);
  return launch_kernel<blocks_topk<T, false>>(config, traits, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const BlocksParams&, const LaunchTarget&);

}  // namespace gvr_topk::blocks
