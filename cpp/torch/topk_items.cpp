// The CUDA implementation of torch.ops.gvr_topk.topk_items over libtorch's stable ABI. The schema, the fake
// kernel and the CPU implementation are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

TopkItemsParams make_params(const TopkItemsArguments& a) {
  TopkItemsParams p{};
  p.scores = a.logits.data_ptr();
  p.scores_stride = a.logits.stride(0);
  p.candidates = pointer<const int64_t>(a.candidates);
  p.values = pointer<void>(a.values);
  p.indices = static_cast<int64_t*>(a.indices.data_ptr());
  p.rows = static_cast<int32_t>(a.logits.size(0));
  p.width = static_cast<int32_t>(a.logits.size(1));
  p.k = static_cast<int32_t>(a.indices.size(1));
  p.sorted = a.sorted != 0;
  p.dtype = dtype_of(a.logits);
  return p;
}

// The parameters of a launch that selects in whole rows without a state, by what is largest or smallest.
TopkParams selection_of(const TopkItemsParams& items, int32_t* positions) {
  TopkParams p{};
  const bool reverses = items.reversed != nullptr;
  p.logits = reverses ? items.reversed : items.scores;
  p.seq_lens = items.lengths;
  p.logits_stride = reverses ? items.reversed_stride : items.scores_stride;
  p.width = items.width;
  p.k = items.k;
  p.next_n = 1;
  p.indices = positions;
  p.indices_stride = items.k;
  p.rows = items.rows;
  p.compress_ratio = 1;
  p.dtype = reverses ? Dtype::kFloat32 : items.dtype;
  return p;
}

void topk_items(const TopkItemsArguments& a) {
  const CheckedOp op("topk");
  check_on_gpu(a.logits);
  check_arguments(a);
  TopkItemsParams items = make_params(a);
  const int64_t rows = items.rows, count = rows * items.k;
  if (count == 0) return;
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const bool reverses = a.largest == 0;
  if (reverses) items.reversed_stride = (int64_t{items.width} + 3) / 4 * 4;
  const int64_t reversed_words = rows * items.reversed_stride;
  const int64_t sort_words = (static_cast<int64_t>(sort_space_bytes(items)) + 15) / 16 * 4;
  const GivenTensor workspace = make_workspace(sort_words + reversed_words + count + rows, device);
  auto* const words = static_cast<int32_t*>(workspace.data_ptr());
  if (sort_words > 0) items.sort_space = words;
  if (reverses) items.reversed = reinterpret_cast<float*>(words + sort_words);
  int32_t* const positions = words + sort_words + reversed_words;
  items.positions = positions;
  items.lengths = positions + count;
  require_launched(launch_preparation(items, target.stream));
  const TopkParams p = selection_of(items, positions);
  // Its launch is hidden behind one that is short. Behind a long one its CTAs would crowd on few SMs.
  launch_decode(p, on_gpu({p.rows, p.width, p.k, p.dtype}, p, target), target, !reverses);
  require_launched(launch_topk_items(items, target.stream));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("topk_items", TORCH_BOX(&gvr_topk::TopkItemsArguments::call<&gvr_topk::topk_items>));
}
