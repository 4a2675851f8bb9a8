// What a build with GVR_TOPK_CHECK_CONVERGED counts, and how the counts of every CUDA file are read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gvr_topk::converged {

// Lanes that came to one place in the sources. Both counts are in one word, so that one addition counts:
// those of all lanes in the lower bits, and above them those that came without the whole of their warp.
constexpr int kApartBit = 40;

// Several lanes add to a word of their own, so that fewer wait for each other.
constexpr uint32_t kWords = 8;
struct Count {
  uint64_t words[kWords];
};

// Numbers of places are below this one.
constexpr uint32_t kPlaces = 1 << 16;

// The counts of one CUDA file on the current device.
struct Table {
  const char* file;
  cudaError_t (*read)(Count* counts);  // writes kPlaces counts
};

}  // namespace gvr_topk::converged
