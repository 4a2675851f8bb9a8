// Launches the sampler of rows that are not held, for every dtype.
#include "core/launch.cuh"
#include "sampling_stream/kernel.cuh"

namespace gvr_topk::sampling_stream {

template <typename T>
cudaError_t launch(const SampleParams& params, const SamplePlan& plan, const LaunchTarget& target) {
  const int ctas = plan.streamed_ctas;
  const LaunchConfig config(dim3(params.rows * ctas), dim3(kThreads), kSharedBytes, ctas, target);
  return launch_kernel<stream_rows<T>>(config, params);
}

GVR_TOPK_LAUNCH_EVERY_DTYPE(const SampleParams&, const SamplePlan&, const LaunchTarget&);

}  // namespace gvr_topk::sampling_stream
