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

void prefill(const PrefillArguments& a) {
  const CheckedOp op("indexer_topk_prefill");
  check_on_gpu(a.logits);
  check_arguments(a);
  PrefillParams params = make_params(a, a.out);
  if (params.rows == 0) return;
  params.stats = pointer<int32_t>(a.stats);
  params.predicts = a.path == static_cast<int64_t>(Path::kAuto);
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const int64_t stride = params.logits_stride * element_bytes(params.dtype);
  const bool aligned = are_aligned(params.logits, params.rows, stride);
  const PrefillPlan plan = make_prefill_plan(
      PrefillInput{params.rows, params.width, a.k, params.dtype, static_cast<Path>(a.path),
                   target.context.sm_count, target.arch, aligned, (a.flags & kFlagStreams) != 0});
  params.runs_per_cta = plan.runs_per_cta;
  params.lists = plan.lists;
  params.bitmap_pairs = plan.bitmap_pairs;
  check_launch(launch_prefill(params, plan, (a.flags & kFlagPdl) != 0, target.stream), plan.ctas, target);
}

void prefill_slice(const PrefillSliceArguments& a) {
  const CheckedOp op("indexer_topk_prefill");
  check_on_gpu(a.logits);
  check_arguments(a);
  SliceParams params{};
  params.prefill = make_params(a, a.out);
  if (params.prefill.rows == 0) return;
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  const SlicePlan plan = make_slice_plan(params.prefill.rows, target.context.sm_count, target.arch);
  params.prefill.runs_per_cta = plan.runs_per_cta;
  params.prefill.lists = a.k <= kPrefillMaxK;
  params.carry = static_cast<uint64_t*>(a.carry.data_ptr());
  params.column = static_cast<int32_t>(a.column);
  params.list_chunks = plan.list_chunks;
  params.ends = a.out.has_value();
  check_launch(launch_prefill_slice(params, plan, (a.flags & kFlagPdl) != 0, target.stream), plan.ctas,
               target);
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_prefill", TORCH_BOX(&gvr_topk::PrefillArguments::call<&gvr_topk::prefill>));
  m.impl("indexer_topk_prefill_slice",
         TORCH_BOX(&gvr_topk::PrefillSliceArguments::call<&gvr_topk::prefill_slice>));
}
