// Launches one instantiation of the cluster kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "cluster/kernel.cuh"

namespace gvr_topk::cluster {

// Attributes belong to a kernel and a device; they are set once, because setting them costs more host
// time than the launch.
template <typename T>
cudaError_t allow_large_clusters() {
  static std::atomic<uint64_t> done{0};
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  int shared_limit = 0;
  status = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(cluster_topk<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(cluster_topk<T>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status != cudaSuccess) return status;
  done.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

template <typename T>
cudaError_t launch(const TopkParams& params, const Plan& plan, bool use_guess, bool pdl,
                   cudaStream_t stream) {
  const cudaError_t status = allow_large_clusters<T>();
  if (status != cudaSuccess) return status;
  const Shape shape{log2_of(plan.ctas_per_row), plan.list_capacity, plan.candidate_capacity, plan.masks, use_guess};
  cudaLaunchAttribute attribute[2];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim.x = plan.ctas_per_row;
  attribute[0].val.clusterDim.y = 1;
  attribute[0].val.clusterDim.z = 1;
  attribute[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.rows * plan.ctas_per_row);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes(shape);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = pdl ? 2 : 1;
  return cudaLaunchKernelEx(&config, cluster_topk<T>, params, shape);
}

}  // namespace gvr_topk::cluster
