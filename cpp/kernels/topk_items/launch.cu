// Launches the kernels that prepare a selection, and list and sort selected items.
#include "core/launch.cuh"
#include "gvr_topk/launch.h"
#include "topk_items/kernel.cuh"

namespace gvr_topk {
namespace topk_items {

template <int kSortThreads, int kEach>
cudaError_t sort(const TopkItemsParams& params, const LaunchTarget& target) {
  const LaunchConfig config(dim3(params.rows), dim3(kSortThreads), sizeof(SortShared<kSortThreads, kEach>), 1,
                            target);
  return launch_kernel<sort_items<kSortThreads, kEach>>(config, params);
}

}  // namespace topk_items

cudaError_t launch_preparation(const TopkItemsParams& params, cudaStream_t stream) {
  using namespace topk_items;
  const bool reverses = params.reversed != nullptr;
  const int chunks = reverses ? (params.width + kPrepareChunk - 1) / kPrepareChunk : 0;
  const int64_t ctas =
      reverses ? int64_t{params.rows} * chunks : (params.rows + kPrepareThreads - 1) / kPrepareThreads;
  const LaunchConfig config(dim3(static_cast<uint32_t>(ctas)), dim3(kPrepareThreads), 0, 1,
                            LaunchTarget{stream, false, nullptr});
  return launch_kernel<prepare_selection>(config, params, chunks);
}

cudaError_t launch_topk_items(const TopkItemsParams& params, cudaStream_t stream) {
  using namespace topk_items;
  const LaunchTarget target{stream, params.rows <= kMostEarlyCtas, nullptr};
  if (!params.sorted) {
    const int64_t ctas = (int64_t{params.rows} * params.k + kListThreads - 1) / kListThreads;
    const LaunchConfig config(dim3(static_cast<uint32_t>(ctas)), dim3(kListThreads), 0, 1, target);
    return launch_kernel<list_items>(config, params);
  }
  if (params.k <= kFew) {
    constexpr int kRows = kFewThreads / 32;
    const LaunchConfig config(dim3((params.rows + kRows - 1) / kRows), dim3(kFewThreads), 0, 1, target);
    return launch_kernel<sort_few>(config, params);
  }
  if (params.k <= 128) return sort<128, 1>(params, target);
  if (params.k <= 512) return sort<256, 2>(params, target);
  if (params.k <= 1024) return sort<256, 4>(params, target);
  if (params.k <= 2048) return sort<512, 4>(params, target);
  if (params.k <= 4096) return sort<512, 8>(params, target);
  return sort<1024, kMaxSortedItems / 1024>(params, target);
}

}  // namespace gvr_topk
