// Entry points of the kernels; each returns the CUDA status.
#pragma once

#include <cuda_runtime_api.h>

#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// `pdl`: launch with programmatic stream serialization.
cudaError_t launch(const TopkParams& params, const Plan& plan, bool pdl, cudaStream_t stream);

cudaError_t launch_prefill(const PrefillParams& params, const PrefillPlan& plan, bool pdl,
                           cudaStream_t stream);

// Launches the kernel that merges a slice of the rows' columns into their carry.
cudaError_t launch_prefill_slice(const SliceParams& params, const SlicePlan& plan, bool pdl,
                                 cudaStream_t stream);

// Launches the kernel that chooses blocks of each row, or is given them, and selects in them.
cudaError_t launch_blocks(const BlocksParams& params, bool pdl, cudaStream_t stream);

cudaError_t launch_sample(const SampleParams& params, const SamplePlan& plan, bool pdl, cudaStream_t stream);

// Launches the kernel that masks logits, or turns them into probabilities.
cudaError_t launch_limits(const LimitsParams& params, cudaStream_t stream);

cudaError_t launch_topk_logprobs(const TopkLogprobsParams& params, const SamplePlan& plan,
                                 cudaStream_t stream);

// Launches the kernel that accepts drafts; it may start while the kernel before it ends.
cudaError_t launch_verify(const VerifyParams& params, cudaStream_t stream);

// Launches the kernel in which ranks agree on the k-th largest score of each row; with few rows it may
// start while the kernel before it ends.
cudaError_t launch_sharded(const ShardedParams& params, cudaStream_t stream);

// Launches the kernels that give values and indices of selected items; with few rows the first may start
// while the kernel before it ends.
cudaError_t launch_topk_items(const TopkItemsParams& params, cudaStream_t stream);

// How many bytes such a launch needs at `sort_space`: 0 unless the items of many rows are sorted at once.
size_t sort_space_bytes(const TopkItemsParams& params);

// Launches the kernel that makes what the selection of these items needs: lengths, and reversed scores if
// they have a place.
cudaError_t launch_preparation(const TopkItemsParams& params, cudaStream_t stream);

// Stores how many of the plan's clusters can be on the SMs of the stream's context at once; 0 means that such
// a launch would fail.
cudaError_t max_active_clusters(const TopkParams& params, const Plan& plan, cudaStream_t stream,
                                int* clusters);

}  // namespace gvr_topk
