// Entry point of the kernels; returns the CUDA status of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// `pdl`: launch with programmatic stream serialization.
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream);

}  // namespace gvr_topk
