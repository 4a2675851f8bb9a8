// One translation unit per dtype, so that they compile in parallel.
#include "cluster/launch.cuh"

namespace gvr_topk::cluster {

template cudaError_t launch<__half>(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::cluster
