// Launches the kernels that prepare a selection, and list and sort selected items.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

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

// A grid that has so many threads or a few more.
LaunchConfig config_of(int64_t threads, const LaunchTarget& target) {
  const auto ctas = static_cast<uint32_t>((threads + kListThreads - 1) / kListThreads);
  return LaunchConfig(dim3(ctas), dim3(kListThreads), 0, 1, target);
}

// A sort of items of many rows, some rows at a time. Two arrays of numbers take turns; behind them lies what
// CUB needs.
struct ManyItems {
  static constexpr int kMost = 1 << 26;  // items at a time, whose numbers take 1 GiB

  const TopkItemsParams& params;
  int rows;         // at a time
  int64_t numbers;  // of them

  explicit ManyItems(const TopkItemsParams& p)
      : params(p), rows(std::min({p.rows, kMostRows, kMost / p.k})), numbers(int64_t{rows} * p.k) {}

  // Sorts numbers, or if `space` is null stores how many bytes CUB needs.
  cudaError_t sort(void* space, size_t& bytes, cub::DoubleBuffer<uint64_t>& of, int64_t count,
                   cudaStream_t stream) const {
    const int begin = kPositionBits + invariant_bits(params.dtype);
    int end = kRowShift;
    while (rows > 1 << (end - kRowShift)) ++end;
    return cub::DeviceRadixSort::SortKeys(space, bytes, of, static_cast<int>(count), begin, end, stream);
  }

  size_t cub_bytes() const {
    size_t bytes = 0;
    cub::DoubleBuffer<uint64_t> none;
    return sort(nullptr, bytes, none, numbers, nullptr) == cudaSuccess ? bytes : 0;
  }

  cudaError_t launch(const LaunchTarget& target) const {
    auto* const space = static_cast<uint64_t*>(params.sort_space);
    size_t bytes = cub_bytes();
    // CUB has no code for this GPU if it cannot say what it needs.
    if (space == nullptr || bytes == 0) return cudaErrorInvalidDeviceFunction;
    cudaError_t status = cudaSuccess;
    for (int first = 0; first < params.rows && status == cudaSuccess; first += rows) {
      const int64_t count = int64_t{std::min(rows, params.rows - first)} * params.k;
      cub::DoubleBuffer<uint64_t> of(space, space + numbers);
      status = launch_kernel<number_items>(config_of(count, target), params, first, count, of.Current());
      if (status == cudaSuccess) status = sort(space + 2 * numbers, bytes, of, count, target.stream);
      if (status == cudaSuccess) {
        status = launch_kernel<list_items>(config_of(count, target), params, first, count, of.Current());
      }
    }
    return status;
  }
};

}  // namespace topk_items

size_t sort_space_bytes(const TopkItemsParams& params) {
  if (!params.sorted || params.k <= topk_items::kMostSorted) return 0;
  const topk_items::ManyItems items(params);
  const size_t of_cub = items.cub_bytes();
  return of_cub == 0 ? 0 : 2 * sizeof(uint64_t) * items.numbers + of_cub;
}

cudaError_t launch_preparation(const TopkItemsParams& params, cudaStream_t stream) {
  using namespace topk_items;
  const bool reverses = params.reversed != nullptr;
  const int chunks = reverses ? (params.width + kPrepareChunk - 1) / kPrepareChunk : 0;
  const int64_t threads = reverses ? int64_t{params.rows} * chunks * kListThreads : params.rows;
  return launch_kernel<prepare_selection>(config_of(threads, LaunchTarget{stream, false, nullptr}), params,
                                          chunks);
}

cudaError_t launch_topk_items(const TopkItemsParams& params, cudaStream_t stream) {
  using namespace topk_items;
  const LaunchTarget target{stream, params.rows <= kMostEarlyCtas, nullptr};
  if (!params.sorted) {
    const int64_t count = int64_t{params.rows} * params.k;
    return launch_kernel<list_items>(config_of(count, target), params, 0, count, nullptr);
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
  if (params.k <= kMostSorted) return sort<1024, kMostSorted / 1024>(params, target);
  return ManyItems(params).launch(target);
}

}  // namespace gvr_topk
