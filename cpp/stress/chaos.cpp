// The exports of a chaos build beside the op, so that a test can tell it from a normal build and set its
// mode.
#include <vector>

#include "chaos_registry.h"

namespace gvr_topk::chaos {
namespace {

// Setters are added while the library is loaded, in an unspecified order, so a static object at file scope
// might not exist yet.
std::vector<Setter>& setters() {
  static std::vector<Setter> all;
  return all;
}

}  // namespace

void add_setter(Setter setter) { setters().push_back(setter); }

}  // namespace gvr_topk::chaos

#define GVR_TOPK_EXPORT extern "C" __attribute__((visibility("default")))

// Number of modes, including 0 (off).
GVR_TOPK_EXPORT int gvr_topk_chaos_modes() { return gvr_topk::chaos::kModes; }

// Number of CUDA files whose mode a call of gvr_topk_set_chaos sets.
GVR_TOPK_EXPORT int gvr_topk_chaos_files() { return static_cast<int>(gvr_topk::chaos::setters().size()); }

// Sets the mode of all kernels on the current device. No kernel of the library may be running: the caller
// waits for the device before and after. Returns a CUDA status.
GVR_TOPK_EXPORT int gvr_topk_set_chaos(int mode) {
  if (mode < 0 || mode >= gvr_topk::chaos::kModes) return cudaErrorInvalidValue;
  for (const auto set : gvr_topk::chaos::setters()) {
    const cudaError_t status = set(mode);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
