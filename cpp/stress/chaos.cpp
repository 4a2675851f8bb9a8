// The exports of a chaos build beside the op, so that a test can tell it from a normal build and set its
// mode.
#include "chaos_modes.h"
#include "registry.h"

using gvr_topk::chaos::kModes;
using gvr_topk::chaos::Setter;
using gvr_topk::stress::entries;

// Number of modes, including 0 (off).
GVR_TOPK_EXPORT int gvr_topk_chaos_modes() { return kModes; }

// Number of CUDA files whose mode a call of gvr_topk_set_chaos sets.
GVR_TOPK_EXPORT int gvr_topk_chaos_files() { return static_cast<int>(entries<Setter>().size()); }

// Sets the mode of all kernels on the current device. No kernel of the library may be running: the caller
// waits for the device before and after. Returns a CUDA status.
GVR_TOPK_EXPORT int gvr_topk_set_chaos(int mode) {
  if (mode < 0 || mode >= kModes) return cudaErrorInvalidValue;
  for (const Setter& file : entries<Setter>()) {
    const cudaError_t status = file.set(mode);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
