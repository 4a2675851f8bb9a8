// Launches the kernel for slices of rows of prefill, for every dtype.
#include "prefill_slice/kernel.cuh"

namespace gvr_topk::prefill_slice {

template <typename T>
cudaError_t launch(const SliceParams& params, const SlicePlan& plan, const LaunchTarget& target) {
  const LaunchConfig config(dim3(plan.ctas), dim3(kBlockThreads), shared_bytes(params.list_chunks), 1,
                            target);
  return launch_kernel<prefill_slice_topk<T>>(config, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const SliceParams&, const SlicePlan&, const LaunchTarget&);

}  // namespace gvr_topk::prefill_slice
