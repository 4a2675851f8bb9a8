// The CUDA implementation of torch.ops.gvr_topk.topk_items over libtorch's stable ABI. The schema, the fake
// kernel and the CPU implementation are in Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

TopkItemsParams make_params(const TopkItemsArguments& a) {
  TopkItemsParams p{};
  p.scores = a.logits.data_ptr();
  p.scores_stride = a.logits.stride(0);
  p.candidates = pointer<const int64_t>(a.candidates);
  p.values = a.values.data_ptr();
  p.indices = static_cast<int64_t*>(a.indices.data_ptr());
  p.rows = static_cast<int32_t>(a.logits.size(0));
  p.width = static_cast<int32_t>(a.logits.size(1));
  p.k = static_cast<int32_t>(a.values.size(1));
  p.order = static_cast<ItemOrder>(a.order);
  p.dtype = dtype_of(a.logits);
  return p;
}

// Selects positions, all of whole rows and without a state.
void select_positions(const Tensor& rows, const GivenTensor& lengths, const GivenTensor& positions, int32_t k,
                      const CallTarget& target) {
  TopkParams p{};
  p.logits = rows.data_ptr();
  p.seq_lens = static_cast<const int32_t*>(lengths.data_ptr());
  p.logits_stride = rows.stride(0);
  p.width = static_cast<int32_t>(rows.size(1));
  p.k = k;
  p.next_n = 1;
  p.indices = static_cast<int32_t*>(positions.data_ptr());
  p.indices_stride = k;
  p.rows = static_cast<int32_t>(rows.size(0));
  p.compress_ratio = 1;
  p.dtype = dtype_of(rows);
  torch::stable::fill_(lengths, p.width);
  launch_decode(p, on_gpu({p.rows, p.width, k, p.dtype}, p, target), target, false);
}

void topk_items(const TopkItemsArguments& a) {
  const CheckedOp op("topk");
  check_on_gpu(a.logits);
  check_arguments(a);
  TopkItemsParams p = make_params(a);
  if (p.rows == 0 || p.k == 0) return;
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const GivenTensor lengths = make_workspace(p.rows, device);
  const GivenTensor positions = make_workspace(int64_t{p.rows} * p.k, device);
  select_positions(a.selected_by ? *a.selected_by : a.logits, lengths, positions, p.k, target);
  p.positions = static_cast<const int32_t*>(positions.data_ptr());
  p.positions_stride = p.k;
  require_launched(launch_topk_items(p, target.stream));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("topk_items", TORCH_BOX(&gvr_topk::TopkItemsArguments::call<&gvr_topk::topk_items>));
}
