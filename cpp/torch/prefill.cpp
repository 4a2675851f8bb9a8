// The CUDA implementation of torch.ops.gvr_topk.indexer_topk_prefill over libtorch's stable ABI. The schema,
// the fake kernel and the CPU implementation are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

PrefillParams make_params(const PrefillArguments& a) {
  PrefillParams p{};
  p.logits = a.logits.data_ptr();
  p.row_starts = static_cast<const int32_t*>(a.row_starts.data_ptr());
  p.row_ends = static_cast<const int32_t*>(a.row_ends.data_ptr());
  p.logits_stride = a.logits.stride(0);
  p.width = static_cast<int32_t>(a.logits.size(1));
  p.k = static_cast<int32_t>(a.k);
  p.rows = static_cast<int32_t>(a.logits.size(0));
  p.requests = clamped(requests_of(a));
  p.row_request = pointer<int32_t>(a.row_request);
  p.offsets = pointer<int32_t>(a.offsets);
  p.indices = static_cast<int32_t*>(a.out.data_ptr());
  p.indices_stride = a.out.stride(0);
  p.page_table = page_pointer(a.page_table, p.row_starts);
  p.page_table_stride = a.page_table ? a.page_table->stride(0) : 0;
  p.slots = pointer<int32_t>(a.slots);
  p.slots_stride = a.slots ? a.slots->stride(0) : 0;
  p.counts = pointer<int32_t>(a.counts);
  p.stats = pointer<int32_t>(a.stats);
  p.pages_per_request = a.page_table ? clamped(a.page_table->size(1)) : 0;
  p.page_size = a.page_table ? static_cast<int32_t>(a.page_size) : 0;
  p.dtype = dtype_of(a.logits);
  p.predicts = a.path == static_cast<int64_t>(Path::kAuto);
  return p;
}

void indexer_topk_prefill(GivenTensor logits, GivenTensor row_starts, GivenTensor row_ends, GivenTensor out,
                          int64_t k, OptionalGivenTensor row_request, OptionalGivenTensor offsets,
                          OptionalGivenTensor counts, OptionalGivenTensor page_table,
                          OptionalGivenTensor slots, OptionalGivenTensor stats, int64_t page_size,
                          int64_t path, int64_t flags) {
  const CheckedOp op("indexer_topk_prefill");
  const PrefillArguments arguments{logits, row_starts, row_ends, out,   k,         row_request, offsets,
                                   counts, page_table, slots,    stats, page_size, path,        flags};
  check_on_gpu(arguments.logits);
  check_arguments(arguments);
  PrefillParams params = make_params(arguments);
  if (params.rows == 0) return;
  const int device = arguments.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const int64_t stride = params.logits_stride * element_bytes(params.dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(params.logits) % 16 == 0 && stride % 16 == 0;
  const PrefillPlan plan = make_prefill_plan(PrefillInput{params.rows, params.width, k, params.dtype,
                                                          static_cast<Path>(path), target.context.sm_count,
                                                          target.arch, aligned, (flags & kFlagStreams) != 0});
  params.runs_per_cta = plan.runs_per_cta;
  params.lists = plan.lists;
  params.bitmap_tiles = plan.bitmap_tiles;
  const cudaError_t status = launch_prefill(params, plan, (flags & kFlagPdl) != 0, target.stream);
  require(status == cudaSuccess, "gvr_topk: launch of ", plan.ctas, " CTAs on ", target.context.sm_count,
          " SMs failed: ", cudaGetErrorString(status));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_prefill", TORCH_BOX(&gvr_topk::indexer_topk_prefill));
}
