// The CUDA implementation of torch.ops.gvr_topk.indexer_topk_decode over libtorch's stable ABI. The schema,
// the fake kernel and the CPU implementation are in Python (gvr_topk/arguments.py, ops.py, cpu.py).
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

TopkParams make_params(const DecodeArguments& a) {
  TopkParams p{};
  p.logits = a.logits.data_ptr();
  p.seq_lens = static_cast<const int32_t*>(a.seq_lens.data_ptr());
  p.logits_stride = a.logits.stride(0);
  p.state = pointer<float>(a.state);
  p.width = selectable_width(a);
  p.k = static_cast<int32_t>(a.k);
  p.next_n = static_cast<int32_t>(a.next_n);
  p.num_slots = a.state ? clamped(a.state->size(0)) : 0;
  p.state_indices = pointer<int32_t>(a.indices);
  p.state_indices_stride = a.indices ? a.indices->stride(0) : 0;
  p.next_state = pointer<float>(a.next_state);
  p.row_slot = pointer<int32_t>(a.row_slot);
  p.hint_offset = static_cast<int32_t>(a.hint_offset);
  p.page_size = a.page_table ? static_cast<int32_t>(a.page_size) : 0;
  p.indices = static_cast<int32_t*>(a.out.data_ptr());
  p.indices_stride = a.out.stride(0);
  p.page_table = page_pointer(a.page_table, p.seq_lens);
  p.page_table_stride = a.page_table ? a.page_table->stride(0) : 0;
  p.slots = pointer<int32_t>(a.slots);
  p.slots_stride = a.slots ? a.slots->stride(0) : 0;
  p.counts = pointer<int32_t>(a.counts);
  p.stats = pointer<int32_t>(a.stats);
  p.pages_per_request = a.page_table ? clamped(a.page_table->size(1)) : 0;
  p.rows = static_cast<int32_t>(a.logits.size(0));
  p.compress_ratio = static_cast<int32_t>(a.compress_ratio);
  p.dtype = dtype_of(a.logits);
  // With one row per request, a length of the request and a length of the row are the same number.
  p.row_lengths = a.next_n > 1 && a.seq_lens.size(0) == a.logits.size(0);
  p.quantile_guess = (a.flags & kFlagQuantileGuess) != 0;
  p.drop_masked = (a.flags & kFlagDropMasked) != 0;
  return p;
}

void run(const DecodeArguments& a) {
  const CheckedOp op("indexer_topk_decode");
  check_on_gpu(a.logits);
  check_arguments(a);
  const TopkParams params = make_params(a);
  if (params.rows == 0) return;
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const PlanInput input = on_gpu(plan_input(a), params, target);
  check_plan(a, input);
  launch_decode(params, input, target, (a.flags & kFlagPdl) != 0);
}

// The overload of calls that need no more than these arguments. The others are null or 0.
void indexer_topk_decode_usual(GivenTensor logits, GivenTensor seq_lens, GivenTensor out, int64_t k,
                               OptionalGivenTensor row_slot, OptionalGivenTensor state, int64_t next_n,
                               int64_t compress_ratio, int64_t flags) {
  run(DecodeArguments{logits, seq_lens, out, k, row_slot, state, next_n, compress_ratio, flags});
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_decode", TORCH_BOX(&gvr_topk::DecodeArguments::call<&gvr_topk::run>));
  m.impl("indexer_topk_decode.usual", TORCH_BOX(&gvr_topk::indexer_topk_decode_usual));
}
