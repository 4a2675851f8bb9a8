// The modes of a chaos build, and the function by which every CUDA file sets its own.
#pragma once

#include <cuda_runtime_api.h>

namespace gvr_topk::chaos {

// Modes are named by the threads that they delay. The host refuses numbers from kModes on;
// eval/stress/stress_library.py names the modes for Python.
enum Mode : int {
  kOff = 0,
  kRandom = 1,          // every warp now and then, and a whole CTA for a while
  kLastCta = 2,         // the last CTA of a cluster, after every wait for the cluster
  kFirstCta = 3,        // the first CTA, after every wait for the cluster
  kOneWarp = 4,         // one warp of each CTA, which changes with time
  kAllWarpsButOne = 5,  // all warps of each CTA but that one
  kRoamingCta = 6,      // one CTA of a cluster, which changes with time
  kOddRows = 7,         // every second row of a launch
  kModes = 8,
};

// Sets the mode of one CUDA file on the current device.
struct Setter {
  cudaError_t (*set)(int mode);
};

}  // namespace gvr_topk::chaos
