// Launches the prefill kernel, for every dtype.
#include "prefill/kernel.cuh"

namespace gvr_topk::prefill {

template <typename T>
cudaError_t launch(const PrefillParams& params, int32_t ctas, const LaunchTarget& target) {
  const LaunchConfig config(dim3(ctas), dim3(kThreads), shared_bytes(params.bitmap_tiles), 1, target);
  return launch_kernel<prefill_topk<T>>(config, params);
}

template cudaError_t launch<float>(const PrefillParams&, int32_t, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const PrefillParams&, int32_t, const LaunchTarget&);
template cudaError_t launch<__half>(const PrefillParams&, int32_t, const LaunchTarget&);

}  // namespace gvr_topk::prefill
