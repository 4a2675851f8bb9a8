// Launches the kernel for slices of rows of prefill, for every dtype.
#include "prefill_slice/kernel.cuh"

namespace gvr_topk::prefill_slice {

template <typename T>
cudaError_t launch(const SliceParams& params, const SlicePlan& plan, const LaunchTarget& target) {
  const LaunchConfig config(dim3(plan.ctas), dim3(kBlockThreads), shared_bytes(params.list_chunks), 1,
                            target);
  return launch_kernel<prefill_slice_topk<T>>(config, params);
}

template cudaError_t launch<float>(const SliceParams&, const SlicePlan&, const LaunchTarget&);
template cudaError_t launch<__nv_bfloat16>(const SliceParams&, const SlicePlan&, const LaunchTarget&);
template cudaError_t launch<__half>(const SliceParams&, const SlicePlan&, const LaunchTarget&);

}  // namespace gvr_topk::prefill_slice
