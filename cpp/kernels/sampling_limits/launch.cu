// Launches the kernels that apply limits, for every dtype.
#include "core/launch.cuh"
#include "sampling_limits/kernel.cuh"

namespace gvr_topk::sampling_limits {

template <typename T>
cudaError_t launch(const LimitsParams& params, const LaunchTarget& target) {
  // One vector more than a row without gaps has: rows need not begin at multiples of 16 bytes.
  constexpr int kChunk = kThreads * kVectors * kPerVec<T>;
  const int chunks = (params.vocabulary + kPerVec<T> - 1 + kChunk - 1) / kChunk;
  const LaunchConfig config(dim3(params.rows * chunks), dim3(kThreads), 0, 1, target);
  return params.out != nullptr ? launch_kernel<apply_limits<T, true>>(config, params)
                               : launch_kernel<apply_limits<T, false>>(config, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const LimitsParams&, const LaunchTarget&);

}  // namespace gvr_topk::sampling_limits
