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
  const TopkParams& topk = params.topk;
  Plan plan{};
  plan.path = Path::kNoHint;
  plan.ctas_per_row = params.ctas_per_row;
  LaunchTraits traits = describe_launch<T>(topk, plan);
  if (params.row_starts != nullptr) traits.flags |= LaunchTraits::kRowStarts;
  const dim3 threads(kThreads);
  if (params.values != nullptr) {
    const int64_t runs = (params.values_stride + kThreads - 1) / kThreads;
    const int64_t parts = std::clamp<int64_t>(kValueCtas / topk.rows, 1, runs);
    const LaunchConfig every_part(dim3(topk.rows, parts), threads, sizeof(RowShared), 1, target);
    return launch_kernel<block_values<T>>(every_part, traits, params);
  }
  if (params.given != nullptr) {
    const int64_t selected = std::min<int64_t>(topk.k, int64_t{params.block_k} * kBlockScores);
    const LaunchConfig config(dim3(topk.rows), threads, given_blocks_bytes(selected), 1, target);
    if (are_few(params.block_k))
      return launch_kernel<blocks_topk<T, Source::kFewGiven>>(config, traits, params);
    return launch_kernel<blocks_topk<T, Source::kGiven>>(config, traits, params);
  }
  const LaunchConfig config(dim3(topk.rows * plan.ctas_per_row), threads, chosen_blocks_bytes(topk.width),
                            plan.ctas_per_row, target);
  if (plan.ctas_per_row > 1) return launch_kernel<blocks_topk<T, Source::kCluster>>(config, traits, params);
  return launch_kernel<blocks_topk<T, Source::kRow>>(config, traits, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const BlocksParams&, const LaunchTarget&);

}  // namespace gvr_topk::blocks
