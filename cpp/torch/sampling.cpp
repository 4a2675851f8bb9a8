// The CUDA implementation of torch.ops.gvr_topk.sample over libtorch's stable ABI. The schema, the fake
// kernel and the CPU implementation are in Python.
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"
#include "gvr_topk/sampling_arithmetic.h"

namespace gvr_topk {
namespace {

// A parameter on the GPU, or in pinned memory of the host, where kernels can read it.
template <typename T>
const T* parameter_pointer(const OptionalTensor& t, const char* name, const Tensor& logits, ScalarType dtype,
                           int64_t count) {
  if (!t) return nullptr;
  if (t->is_cuda()) {
    check_tensor(name, t, logits, dtype, {count});
    return static_cast<const T*>(t->data_ptr());
  }
  check(t->scalar_type() == dtype, name, ": wanted dtype ", name_of(dtype), ", got ",
        name_of(t->scalar_type()));
  check(t->dim() == 1 && t->size(0) == count, name, ": wanted ", Wanted{{count}}, ", got ", describe(*t));
  check(count <= 1 || t->stride(0) == 1, name, ": wanted inner stride 1, got ", t->stride(0));
  if (count == 0) return nullptr;  // Every row is skipped.
  cudaPointerAttributes attributes{};
  const bool known = cudaPointerGetAttributes(&attributes, t->data_ptr()) == cudaSuccess;
  check(known && attributes.type == cudaMemoryTypeHost, name, ": wanted a tensor on ", DeviceName{logits},
        " or in pinned memory, got one on another device");
  return static_cast<const T*>(attributes.devicePointer);
}

// How many numbers each parameter of a request has; kAny: none of them is a tensor.
int64_t parameters_of(const SampleArguments& a) {
  if (!a.slots) return a.logits.size(0);
  for (const OptionalTensor* t : {&a.temperature, &a.top_k, &a.top_p, &a.min_p, &a.seeds}) {
    if (*t && (*t)->dim() == 1) return (*t)->size(0);
  }
  return kAny;
}

bool may_keep_all(const SampleParams& p) {
  return (p.top_k.each != nullptr || p.top_k.all <= 0 || p.top_k.all >= p.vocabulary) &&
         (p.top_p.each != nullptr || !(p.top_p.all < 1.0f)) &&
         (p.min_p.each != nullptr || !(p.min_p.all > 0.0f));
}

// Whether of rows without filters, if there are any, the greatest score with noise says all that is asked.
bool asks_noise_alone(const SampleParams& p) {
  const bool asks_more = p.logprobs != nullptr || p.ranks != nullptr || p.kept != nullptr ||
                         p.counts != nullptr || p.limits != nullptr;
  const bool draws = p.temperature.each != nullptr || !sampling::is_greedy(p.temperature.all);
  return p.gumbel && !asks_more && draws && may_keep_all(p);
}

// Whether the kernel that streams rows can take some of them, as far as the host knows.
bool may_stream(const SampleParams& p, int32_t element_bytes) {
  const int64_t stride = p.logits_stride * element_bytes;
  const bool aligned = are_aligned(p.logits, p.rows, stride);
  const bool cuts_p = p.top_p.each == nullptr && p.top_p.all < 1.0f;
  const bool counts_all =
      (p.order == FilterOrder::kJoint && cuts_p) || (p.raw_logprobs && p.logprobs != nullptr);
  const bool greedy = p.temperature.each != nullptr || sampling::is_greedy(p.temperature.all);
  const bool unknown_k = p.top_k.each != nullptr, no_k = p.top_k.all <= 0 || p.top_k.all >= p.vocabulary;
  // Ranks count all logits that equal the k-th one, of which rows of 16 bits have too many to list.
  const bool counts_ties = p.ranks != nullptr && element_bytes == 2 && p.top_k.all > kMaxRankedTokens / 4 * 3;
  const bool small_k =
      unknown_k || (!no_k && !counts_ties && sampling::streams_top_k(p.top_k.all, p.vocabulary));
  const bool whole_p = p.order == FilterOrder::kVllm || !cuts_p;
  const bool near = (p.min_p.each != nullptr || p.min_p.all > 0.0f) && (unknown_k || no_k) && whole_p;
  return aligned && !counts_all && p.allow == nullptr && (greedy || small_k || near || p.noise_alone);
}

void check_sample(const SampleArguments& a) {
  check_rows(a.logits);
  const int64_t rows = a.logits.size(0);
  check_ids("out", a.out, a.logits, {rows});
  if (a.slots) check_ids("slots", a.slots, a.logits, {rows});
  check_optional("positions", a.positions, a.logits, ScalarType::Long);
  check_mask(a);
  check_outputs(a);
  check_memory(a);
}

void sample(const SampleArguments& a) {
  const CheckedOp op("sample");
  check_on_gpu(a.logits);
  check_sample(a);
  SampleParams p{};
  p.rows = static_cast<int32_t>(a.logits.size(0));
  const int device = a.logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  p.vocabulary = static_cast<int32_t>(std::min<int64_t>(a.logits.size(1), INT32_MAX));
  p.dtype = dtype_of(a.logits);
  const int32_t element_bytes = p.dtype == Dtype::kFloat32 ? 4 : 2;
  SamplePlan plan =
      make_sample_plan(p.rows, a.logits.size(1), element_bytes, target.context.sm_count, target.arch);
  check(plan.vectors_per_warp > 0, "logits: wanted rows of at most ", max_sample_bytes(target.arch),
        " bytes, got ", a.logits.size(1) * element_bytes);
  p.logits = a.logits.data_ptr();
  p.logits_stride = a.logits.stride(0);
  p.vectors_per_warp = plan.vectors_per_warp;
  if (a.slots) p.row_slot = ids_of(*a.slots);
  const int64_t count = parameters_of(a);
  p.num_slots = count == kAny ? INT64_MAX : count;
  p.temperature = {parameter_pointer<float>(a.temperature, "temperature", a.logits, ScalarType::Float, count),
                   static_cast<float>(a.temperature_value)};
  p.top_k = {parameter_pointer<int32_t>(a.top_k, "top_k", a.logits, ScalarType::Int, count),
             clamped(a.top_k_value)};
  p.top_p = {parameter_pointer<float>(a.top_p, "top_p", a.logits, ScalarType::Float, count),
             static_cast<float>(a.top_p_value)};
  p.min_p = {parameter_pointer<float>(a.min_p, "min_p", a.logits, ScalarType::Float, count),
             static_cast<float>(a.min_p_value)};
  p.seed = {parameter_pointer<int64_t>(a.seeds, "seeds", a.logits, ScalarType::Long, count), a.seeds_value};
  p.position = {pointer<int64_t>(a.positions), a.positions_value};
  p.allow = pointer<uint32_t>(a.allow);
  p.allow_row = pointer<int32_t>(a.allow_row);
  p.allow_stride = a.allow ? a.allow->stride(0) : 0;
  p.allow_rows = a.allow ? clamped(a.allow->size(0)) : 0;
  p.order = static_cast<FilterOrder>(a.order);
  p.gumbel = a.noise == 1;
  p.raw_logprobs = a.logprob_mode == 0;
  p.out = ids_of(a.out);
  p.logprobs = pointer<float>(a.logprobs);
  p.ranks = pointer<int64_t>(a.ranks);
  p.kept = pointer<int32_t>(a.kept);
  p.kept_logprobs = pointer<float>(a.kept_logprobs);
  p.kept_stride = a.kept ? a.kept->stride(0) : 0;
  p.kept_logprobs_stride = a.kept_logprobs ? a.kept_logprobs->stride(0) : 0;
  p.kept_columns = a.kept ? a.kept->size(1) : INT64_MAX;
  p.counts = pointer<int32_t>(a.counts);
  p.limits = pointer<SampleLimits>(a.limits);
  p.flags = pointer<int32_t>(a.flags);
  p.noise_alone = asks_noise_alone(p);
  if (p.rows == 0) return;
  std::optional<GivenTensor> pending;
  if (may_stream(p, element_bytes)) {
    plan.streamed_ctas =
        streamed_sample_ctas(p.rows, p.vocabulary, a.logits.size(1) * element_bytes, target.context.sm_count);
  }
  if (plan.streamed_ctas > 0) {
    pending = make_workspace(p.rows, device);
    p.pending = static_cast<int32_t*>(pending->data_ptr());
    p.one_kind = p.temperature.each == nullptr && p.top_k.each == nullptr && p.top_p.each == nullptr &&
                 p.min_p.each == nullptr && p.row_slot.data == nullptr;
  }
  const cudaError_t status = launch_sample(p, plan, (a.options & kFlagPdl) != 0, target.stream);
  require(status == cudaSuccess, "gvr_topk: launch of ", plan.ctas, " CTAs per row on ",
          target.context.sm_count, " SMs failed: ", cudaGetErrorString(status));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("sample", TORCH_BOX(&gvr_topk::SampleArguments::call<&gvr_topk::sample>));
}
