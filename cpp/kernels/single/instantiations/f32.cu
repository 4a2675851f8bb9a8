// One translation unit per dtype, so that they compile in parallel.
#include "single/launch.cuh"

namespace gvr_topk::single {

template cudaError_t launch<float>(const TopkParams&, const Plan&, const LaunchTarget&);

}  // namespace gvr_topk::single
