// Host code that every kernel launch of this library shares.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/config.cuh"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"

namespace gvr_topk {

// Whether several rows may name one slot of a state that keeps positions. Only one of them may write there.
inline bool may_share_slots(const TopkParams& p) {
  return p.row_slot != nullptr && p.state_indices != nullptr && p.next_state == nullptr && p.rows > p.next_n;
}

// Whether the rows of a launch learn from claims (core/output_writer.cuh) that a later row names their slot.
// With few requests each row searches the later ones itself, which takes less time than another launch.
// A claim takes the place of a kept position: statistics count one hit less, and the paper's guess is made of
// one value less.
inline bool claims_slots(const TopkParams& p) {
  constexpr int kMostSearched = 512;
  return may_share_slots(p) && p.rows / p.next_n > kMostSearched;
}

// Raises a kernel's shared-memory and cluster-size limits on the current device, once per device: the
// attributes belong to a kernel and a device, and setting them costs more host time than a launch.
class KernelLimits {
 public:
  cudaError_t raise(const void* kernel) {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    const uint64_t bit =
        device < 64 ? uint64_t{1} << device : 0;  // Later devices are raised at every launch.
    if (done_.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    int shared_limit = 0;
    status = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess) return status;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit);
    if (status != cudaSuccess) return status;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
    done_.fetch_or(bit, std::memory_order_relaxed);
    return cudaSuccess;
  }

 private:
  std::atomic<uint64_t> done_{0};
};

// Most CTAs of a launch that begins while the kernel before it ends. More would crowd on the few SMs that
// this kernel leaves free, and take turns there (topk of 64 rows, k = 512: 37 us instead of 23).
constexpr int kMostEarlyCtas = 16;

// The stream and the options of a launch.
struct LaunchTarget {
  cudaStream_t stream;
  bool pdl;  // whether to launch with programmatic stream serialization
  // If this is not null, nothing is launched, and the number of clusters that can be resident on the stream's
  // SMs at once is stored here.
  int* active_clusters;
};

struct LaunchConfig {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];
  int* active_clusters;

  LaunchConfig(dim3 grid, dim3 block, size_t shared, int cluster, const LaunchTarget& target)
      : active_clusters(target.active_clusters) {
    int count = 0;
    if (cluster > 1) {  // A launch with clusters of one takes longer than one without clusters.
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count].val.clusterDim.x = cluster;
      attributes[count].val.clusterDim.y = 1;
      attributes[count++].val.clusterDim.z = 1;
    }
    if (target.pdl) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = target.stream;
    config.attrs = attributes;
    config.numAttrs = count;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
};

// Raises the kernel's limits and launches it, or asks how many of its clusters can run at once.
template <auto kKernel, typename... Arguments>
cudaError_t launch_kernel(const LaunchConfig& launch, const Arguments&... arguments) {
  static KernelLimits limits;
  const cudaError_t status = limits.raise(reinterpret_cast<const void*>(kKernel));
  if (status != cudaSuccess) return status;
  if (launch.active_clusters != nullptr) {
    return cudaOccupancyMaxActiveClusters(launch.active_clusters, kKernel, &launch.config);
  }
  return cudaLaunchKernelEx(&launch.config, kKernel, arguments...);
}

// Calls launch(constant) with the one of the constants that `value` equals, or with the last of them.
template <auto kFirst, auto... kOthers, typename Value, typename Launch>
cudaError_t launch_as_constant(Value value, Launch launch) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (value != kFirst) return launch_as_constant<kOthers...>(value, launch);
  }
  return launch(std::integral_constant<decltype(kFirst), kFirst>{});
}

// Instantiates a kernel's `launch`, which has these parameters, for every dtype.
#define GVR_TOPK_LAUNCH_EVERY_DTYPE(...)                   \
  template cudaError_t launch<float>(__VA_ARGS__);         \
  template cudaError_t launch<__nv_bfloat16>(__VA_ARGS__); \
  template cudaError_t launch<__half>(__VA_ARGS__)

}  // namespace gvr_topk
