// Launches the kernel in which ranks agree on the k-th largest score of each row.
#include "core/launch.cuh"
#include "gvr_topk/launch.h"
#include "sharded/kernel.cuh"

namespace gvr_topk {

cudaError_t launch_sharded(const ShardedParams& params, cudaStream_t stream) {
  const int ctas = params.rows < kPeerCtas ? params.rows : kPeerCtas;
  const LaunchTarget target{stream, ctas <= kMostEarlyCtas, nullptr};
  const LaunchConfig config(dim3(ctas), dim3(kThreads), sizeof(sharded::Smem), 1, target);
  return launch_kernel<sharded::choose>(config, params);
}

}  // namespace gvr_topk
