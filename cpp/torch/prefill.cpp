// The CUDA implementation of torch.ops.gvr_topk.indexer_topk_prefill, and of the same on slices, over
// libtorch's stable ABI. The schemas, the fake kernels and the CPU implementations are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

// `out` is null in a call on a slice that does not end the rows.
template <typename Arguments>
PrefillParams make_params(const Arguments& a, const OptionalTensor& out) {
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
  p.indices = pointer<int32_t>(out);
  p.indices_stride = out ? out->stride(0) : 0;
  p.page_table = page_pointer(a.page_table, p.row_starts);
  p.page_table_stride = a.page_table ? a.page_table->stride(0) : 0;
  p.slots = pointer<int32_t>(a.slots);
  p.slots_stride = a.slots ? a.slots->stride(0) : 0;
  p.counts = pointer<int32_t>(a.counts);
  p.pages_per_request = a.page_table ? clamped(a.page_table->size(1)) : 0;
  p.page_size = a.page_table ? static_cast<int32_t>(a.page_size) : 0;
  p.dtype = dtype_of(a.logits);
  return p;
}

void check_launch(cudaError_t status, int32_t ctas, const CallTarget& target) {
  require(status == cudaSuccess, "gvr_topk: launch of ", ctas, " CTAs on ", target.context.sm_count,
          " SMs failed: ", cudaGetErrorString(status));
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
  PrefillParams params = make_params(arguments, arguments.out);
  if (params.rows == 0) return;
  params.stats = pointer<int32_t>(arguments.stats);
  params.predicts = path == static_cast<int64_t>(Path::kAuto);
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
  check_launch(launch_prefill(params, plan, (flags & kFlagPdl) != 0, target.stream), plan.ctas, target);
}

void indexer_topk_prefill_slice(GivenTensor logits, GivenTensor row_starts, GivenTensor row_ends,
                                GivenTensor carry, int64_t k, int64_t column, OptionalGivenTensor out,
                                OptionalGivenTensor row_request, OptionalGivenTensor offsets,
                                OptionalGivenTensor counts, OptionalGivenTensor page_table,
                                OptionalGivenTensor slots, int64_t page_size, int64_t flags) {
  const CheckedOp op("indexer_topk_prefill");
  const PrefillSliceArguments arguments{logits,     row_starts, row_ends,    carry,   k,
                                        column,     out,        row_request, offsets, counts,
                                        page_table, slots,      page_size,   flags};
  check_on_gpu(arguments.logits);
  check_arguments(arguments);
  SliceParams params{};
  params.prefill = make_params(arguments, arguments.out);
  if (params.prefill.rows == 0) return;
  const int device = arguments.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const SlicePlan plan = make_slice_plan(params.prefill.rows, target.context.sm_count, target.arch);
  params.prefill.runs_per_cta = plan.runs_per_cta;
  params.prefill.lists = k <= kPrefillMaxK;
  params.carry = static_cast<uint64_t*>(arguments.carry.data_ptr());
  params.column = static_cast<int32_t>(column);
  params.list_chunks = plan.list_chunks;
  params.ends = arguments.out.has_value();
  check_launch(launch_prefill_slice(params, plan, (flags & kFlagPdl) != 0, target.stream), plan.ctas, target);
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_prefill", TORCH_BOX(&gvr_topk::indexer_topk_prefill));
  m.impl("indexer_topk_prefill_slice", TORCH_BOX(&gvr_topk::indexer_topk_prefill_slice));
}
