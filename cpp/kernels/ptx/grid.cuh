// Programmatic dependent launch: the overlap of a kernel with the kernels before and after it.
#pragma once

#include "ptx/stress_hooks.cuh"

namespace gvr_topk::ptx {

// Waits until the previous kernel has ended and its writes are visible. Returns at once unless the launch
// carries the programmatic-serialization attribute.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  GVR_CHAOS_POINT();
}

// Lets the next kernel start early. That kernel waits for the end of this one before it touches memory that
// this one writes.
__device__ __forceinline__ void grid_launch_dependents() {
  GVR_CHAOS_POINT();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits for the end of the previous kernel and lets the next one start early, so that the launch of the next
// one is hidden behind this kernel.
__device__ __forceinline__ void grid_take_over() {
  grid_dependency_wait();
  grid_launch_dependents();
}

}  // namespace gvr_topk::ptx
