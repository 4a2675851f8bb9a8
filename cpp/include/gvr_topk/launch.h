// Entry points of the kernels; each returns the CUDA status of its launch.
#pragma once

#include <cuda_runtime_api.h>

#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// Rows kept on chip by one cluster each; `use_guess` false starts from the radix rounds.
cudaError_t launch_cluster(const TopkParams& params, const Plan& plan, bool use_guess, bool pdl,
                           cudaStream_t stream);

// The paper's four phases, one CTA per row.
cudaError_t launch_gvr(const TopkParams& params, bool pdl, cudaStream_t stream);

}  // namespace gvr_topk
