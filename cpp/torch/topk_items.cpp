// The CUDA implementation of torch.ops.gvr_topk.topk_items over libtorch's stable ABI. The schema, the fake
// kernel and the CPU implementation are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

void topk_items(const TopkItemsArguments& a) {
  const CheckedOp op("topk");
  check_on_gpu(a.logits);
  check_arguments(a);
  TopkItemsParams p{};
  p.scores = a.logits.data_ptr();
  p.scores_stride = a.logits.stride(0);
  p.positions = static_cast<const int32_t*>(a.positions.data_ptr());
  p.positions_stride = a.positions.stride(0);
  p.candidates = pointer<const int64_t>(a.candidates);
  p.values = a.values.data_ptr();
  p.indices = static_cast<int64_t*>(a.indices.data_ptr());
  p.rows = static_cast<int32_t>(a.logits.size(0));
  p.width = static_cast<int32_t>(a.logits.size(1));
  p.k = static_cast<int32_t>(a.positions.size(1));
  p.order = static_cast<ItemOrder>(a.order);
  p.dtype = dtype_of(a.logits);
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  if (p.rows == 0 || p.k == 0) return;
  require_launched(launch_topk_items(p, target.stream));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("topk_items", TORCH_BOX(&gvr_topk::TopkItemsArguments::call<&gvr_topk::topk_items>));
}
