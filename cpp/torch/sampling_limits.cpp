// The CUDA implementations of apply_limits_, renorm, topk_logprobs and verify over libtorch's stable
// ABI. The schemas, the fake kernels and the CPU implementations are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

// Without `out` logits change in place.
template <typename Arguments>
void apply(const Arguments& a, const Tensor* out) {
  check_on_gpu(a.logits);
  check_arguments(a);
  LimitsParams p{};
  p.logits = a.logits.data_ptr();
  p.logits_stride = a.logits.stride(0);
  p.rows = static_cast<int32_t>(a.logits.size(0));
  p.vocabulary = static_cast<int32_t>(a.logits.size(1));
  p.limits = static_cast<const SampleLimits*>(a.limits.data_ptr());
  p.allow = pointer<const uint32_t>(a.allow);
  p.allow_row = pointer<const int32_t>(a.allow_row);
  p.allow_stride = a.allow ? a.allow->stride(0) : 0;
  p.allow_rows = a.allow ? clamped(a.allow->size(0)) : 0;
  p.dtype = dtype_of(a.logits);
  p.out = out == nullptr ? nullptr : static_cast<float*>(out->data_ptr());
  p.out_stride = out == nullptr ? 0 : out->stride(0);
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  if (p.rows == 0) return;
  require_launched(launch_limits(p, target.stream));
}

void apply_limits(const ApplyLimitsArguments& a) {
  const CheckedOp op("apply_limits_");
  apply(a, nullptr);
}

void renorm(const RenormArguments& a) {
  const CheckedOp op("renorm");
  apply(a, &a.out);
}

void topk_logprobs(const TopkLogprobsArguments& a) {
  const CheckedOp op("topk_logprobs");
  check_on_gpu(a.logits);
  check_arguments(a);
  check(a.n <= kMaxRankedTokens, "n: wanted at most ", kMaxRankedTokens, " on a GPU, got ", a.n);
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  TopkLogprobsParams p{};
  p.row.rows = static_cast<int32_t>(a.logits.size(0));
  p.row.vocabulary = static_cast<int32_t>(a.logits.size(1));
  p.row.dtype = dtype_of(a.logits);
  const int32_t bytes = p.row.dtype == Dtype::kFloat32 ? 4 : 2;
  const SamplePlan plan =
      make_sample_plan(p.row.rows, p.row.vocabulary, bytes, target.context.sm_count, target.arch);
  check(plan.vectors_per_warp > 0, "logits: wanted rows of at most ", max_sample_bytes(target.arch),
        " bytes, got ", a.logits.size(1) * bytes);
  p.row.logits = a.logits.data_ptr();
  p.row.logits_stride = a.logits.stride(0);
  p.row.vectors_per_warp = plan.vectors_per_warp;
  p.n = static_cast<int32_t>(a.n);
  p.sampled = ids_of(a.sampled);
  p.ids = static_cast<int64_t*>(a.ids.data_ptr());
  p.logprobs = static_cast<float*>(a.logprobs.data_ptr());
  p.ids_stride = a.ids.stride(0);
  p.logprobs_stride = a.logprobs.stride(0);
  p.ranks = static_cast<int64_t*>(a.ranks.data_ptr());
  if (p.row.rows == 0) return;
  const cudaError_t status = launch_topk_logprobs(p, plan, target.stream);
  require(status == cudaSuccess, "gvr_topk: launch of ", plan.ctas, " CTAs per row on ",
          target.context.sm_count, " SMs failed: ", cudaGetErrorString(status));
}

void verify(const VerifyArguments& a) {
  const CheckedOp op("verify");
  check_on_gpu(a.drawn, "drawn");
  check_arguments(a);
  VerifyParams p{};
  p.drawn = ids_of(a.drawn);
  p.draft_tokens = ids_of(a.draft_tokens);
  p.starts = pointer<const int32_t>(a.starts);
  p.tokens = ids_of(a.tokens);
  p.tokens_stride = a.tokens.stride(0);
  p.rows = a.drawn.size(0);
  p.requests = static_cast<int32_t>(a.tokens.size(0));
  p.columns = static_cast<int32_t>(a.tokens.size(1));
  p.lengths = static_cast<int32_t*>(a.lengths.data_ptr());
  const int device = a.drawn.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  if (p.requests == 0) return;
  require_launched(launch_verify(p, target.stream));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("apply_limits_", TORCH_BOX(&gvr_topk::ApplyLimitsArguments::call<&gvr_topk::apply_limits>));
  m.impl("renorm", TORCH_BOX(&gvr_topk::RenormArguments::call<&gvr_topk::renorm>));
  m.impl("topk_logprobs", TORCH_BOX(&gvr_topk::TopkLogprobsArguments::call<&gvr_topk::topk_logprobs>));
  m.impl("verify", TORCH_BOX(&gvr_topk::VerifyArguments::call<&gvr_topk::verify>));
}
