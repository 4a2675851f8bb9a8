// The CUDA implementation of torch.ops.gvr_topk.sharded_topk over libtorch's stable ABI. The schema, the fake
// kernel and the way without it are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

void sharded_topk(const ShardedArguments& a) {
  const CheckedOp op("sharded_topk");
  check_on_gpu(a.logits);
  check_arguments(a);
  check(a.inboxes.is_cpu(), "inboxes: wanted a tensor on cpu, got one on another device");
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  cudaPointerAttributes told{};
  check(cudaPointerGetAttributes(&told, a.told.data_ptr()) == cudaSuccess && told.type == cudaMemoryTypeHost,
        "told: wanted pinned memory, got other memory");
  ShardedParams p{};
  p.logits = a.logits.data_ptr();
  p.logits_stride = a.logits.stride(0);
  p.lengths = static_cast<const int32_t*>(a.lengths.data_ptr());
  p.best = static_cast<const int32_t*>(a.best.data_ptr());
  p.best_stride = a.best.stride(0);
  p.out = static_cast<int32_t*>(a.out.data_ptr());
  p.local = static_cast<int32_t*>(a.local.data_ptr());
  p.out_stride = a.out.stride(0);
  p.local_stride = a.local.stride(0);
  p.counts = static_cast<int32_t*>(a.counts.data_ptr());
  p.world = static_cast<int32_t>(a.inboxes.size(0));
  const auto* const inboxes = static_cast<const uintptr_t*>(a.inboxes.data_ptr());
  for (int rank = 0; rank < p.world; ++rank) p.inboxes[rank] = reinterpret_cast<uint64_t*>(inboxes[rank]);
  p.progress = static_cast<uint32_t*>(a.progress.data_ptr());
  p.told = static_cast<int64_t*>(told.devicePointer);
  p.header[0] = a.first_word;
  p.header[1] = a.second_word;
  p.header[2] = a.step_value;
  p.step = pointer<const int64_t>(a.step);
  p.timeout_ns = a.timeout_ns;
  p.rows = static_cast<int32_t>(a.logits.size(0));
  p.width = static_cast<int32_t>(a.logits.size(1));
  p.k = static_cast<int32_t>(a.k);
  p.rank = static_cast<int32_t>(a.rank);
  p.interleave = static_cast<int32_t>(a.interleave);
  p.dtype = dtype_of(a.logits);
  const CallTarget target(device);
  if (p.rows == 0) return;
  require_launched(launch_sharded(p, target.stream));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("sharded_topk", TORCH_BOX(&gvr_topk::ShardedArguments::call<&gvr_topk::sharded_topk>));
}
