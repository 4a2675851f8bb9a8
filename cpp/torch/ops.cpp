// The CUDA implementation of torch.ops.gvr_topk.indexer_topk_decode over libtorch's stable ABI. The
// schema, the fake kernel and the CPU implementation are Python's (gvr_topk/ops.py).
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "capability.h"
#include "check.h"
#include "gvr_topk/launch.h"

// The header hides this function from builds without USE_CUDA, and a CPU build of torch lacks it:
// weak, so that the library loads there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace gvr_topk {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Bits of the `flags` argument.
constexpr int64_t kFlagPdl = 1;
constexpr int64_t kFlagQuantileGuess = 2;

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_) == cudaSuccess, "no usable CUDA device");
    if (previous_ != device) {
      check(cudaSetDevice(device) == cudaSuccess, "logits: cannot select cuda:", device);
      changed_ = true;
    }
  }
  // Only where it was changed: selecting the device that is current would make its primary context current,
  // and a caller in a green context would find itself outside.
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      check(false, "logits: want dtype float32, bfloat16 or float16, got scalar type ",
            static_cast<int>(logits.scalar_type()));
      return Dtype::kFloat32;
  }
}

template <typename T>
T* pointer(const OptionalTensor& t) {
  return t.has_value() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

// The nearest number of 32 bits. Tensors may have more slots or pages than those count; none beyond is ever
// asked for, for slots and positions are numbers of 32 bits themselves.
int32_t clamped(int64_t value) {
  using Limits = std::numeric_limits<int32_t>;
  return static_cast<int32_t>(std::clamp<int64_t>(value, Limits::min(), Limits::max()));
}

void check_optional(const OptionalTensor& t, const char* name, int32_t device, ScalarType dtype,
                    const char* dtype_name, int64_t dim, int64_t first, int64_t second) {
  if (!t.has_value()) return;
  check_tensor(*t, name, device, dtype, dtype_name, dim);
  check(first < 0 || t->size(0) == first, name, ": want ", first, " rows, got ", describe(*t));
  check(dim < 2 || second < 0 || t->size(1) == second, name, ": want ", second, " columns, got ",
        describe(*t));
}

TopkParams make_params(const Tensor& logits, const Tensor& seq_lens, const Tensor& indices,
                       const OptionalTensor& prior, const OptionalTensor& row_slot,
                       const OptionalTensor& guess_state, const OptionalTensor& stats,
                       const OptionalTensor& page_table, const OptionalTensor& phase_clocks, int64_t k,
                       int64_t next_n, int64_t prior_offset, int64_t page_size) {
  check(logits.is_cuda(), "logits: want a CUDA tensor, got one on another device");
  const int32_t device = logits.get_device();
  const Dtype dtype = dtype_of(logits);
  check(logits.dim() == 2, "logits: want [rows, width], got ", describe(logits));
  const int64_t rows = logits.size(0), width = logits.size(1);
  check(width <= 1 || logits.stride(1) == 1, "logits: want inner stride 1, got ", logits.stride(1));
  check(width <= kMaxWidth, "logits: want at most ", kMaxWidth, " columns, got ", width);
  check(rows <= kMaxRows, "logits: want at most ", kMaxRows, " rows, got ", rows);
  check(k >= 1 && k <= kMaxWidth, "k: want 1 to ", kMaxWidth, ", got ", k);
  check(next_n >= 1 && next_n <= 1024, "next_n: want 1 to 1024, got ", next_n);
  check(rows % next_n == 0, "logits: want a multiple of next_n = ", next_n, " rows, got ", rows);
  const int64_t requests = rows / next_n;
  check_tensor(seq_lens, "seq_lens", device, ScalarType::Int, "int32", 1);
  check(seq_lens.size(0) == requests, "seq_lens: want ", requests, " elements, got ", describe(seq_lens));
  check_tensor(indices, "out", device, ScalarType::Int, "int32", 2);
  check(indices.size(0) == rows && indices.size(1) >= k, "out: want [", rows, ", >= ", k, "], got ",
        describe(indices));
  check_rows_apart(indices, "out", k);
  check_optional(prior, "prior", device, ScalarType::Int, "int32", 2, -1, k);
  if (prior) check_rows_apart(*prior, "prior", k);
  check_optional(row_slot, "row_slot", device, ScalarType::Int, "int32", 1, rows, -1);
  check(!row_slot || prior || guess_state, "row_slot: want a prior or a guess_state beside it, got None");
  check(!prior || row_slot || prior->size(0) >= requests, "prior: want at least ", requests,
        " slots without row_slot, got ", prior ? prior->size(0) : 0);
  check_optional(guess_state, "guess_state", device, ScalarType::Float, "float32", 2,
                 prior ? prior->size(0) : -1, kStateFloats);
  check(!guess_state || row_slot || guess_state->size(0) >= requests, "guess_state: want at least ", requests,
        " slots without row_slot, got ", guess_state ? guess_state->size(0) : 0);
  check(!guess_state || guess_state->size(0) <= 1 || guess_state->stride(0) == kStateFloats,
        "guess_state: want contiguous rows, got stride ", guess_state ? guess_state->stride(0) : 0);
  check(!guess_state || reinterpret_cast<uintptr_t>(guess_state->data_ptr()) % 16 == 0,
        "guess_state: want an address that is a multiple of 16, got one that is not");
  check_optional(stats, "stats", device, ScalarType::Int, "int32", 2, rows, kStatColumns);
  check(!stats || rows <= 1 || stats->stride(0) == kStatColumns, "stats: want contiguous rows, got stride ",
        stats ? stats->stride(0) : 0);
  check_optional(page_table, "page_table", device, ScalarType::Int, "int32", 2, requests, -1);
  check(!page_table || page_size >= 1, "page_size: want at least 1 with a page_table, got ", page_size);
  check(!page_table || page_size <= kMaxPageSize, "page_size: want at most ", kMaxPageSize, ", got ",
        page_size);
  check_optional(phase_clocks, "phase_clocks", device, ScalarType::Long, "int64", 2, rows, 8);
  check(!phase_clocks || rows <= 1 || phase_clocks->stride(0) == 8,
        "phase_clocks: want contiguous rows, got stride ", phase_clocks ? phase_clocks->stride(0) : 0);
  check(prior_offset >= -kMaxWidth && prior_offset <= kMaxWidth, "prior_offset: want |offset| <= ", kMaxWidth,
        ", got ", prior_offset);

  TopkParams p{};
  p.logits = logits.data_ptr();
  p.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  p.indices = static_cast<int32_t*>(indices.data_ptr());
  p.prior = pointer<int32_t>(prior);
  p.row_slot = pointer<int32_t>(row_slot);
  p.guess_state = pointer<float>(guess_state);
  p.stats = pointer<int32_t>(stats);
  p.page_table = pointer<int32_t>(page_table);
  // An empty tensor has no address, and null would mean that positions are not translated. No page of an
  // empty table is read, so any address that is not null will do.
  if (page_table && p.page_table == nullptr) p.page_table = p.seq_lens;
  p.phase_clocks = pointer<int64_t>(phase_clocks);
  p.logits_stride = logits.stride(0);
  p.indices_stride = indices.stride(0);
  p.prior_stride = prior ? prior->stride(0) : 0;
  p.page_table_stride = page_table ? page_table->stride(0) : 0;
  p.rows = static_cast<int32_t>(rows);
  p.width = static_cast<int32_t>(width);
  p.next_n = static_cast<int32_t>(next_n);
  p.k = static_cast<int32_t>(k);
  p.num_slots = prior ? clamped(prior->size(0)) : guess_state ? clamped(guess_state->size(0)) : 0;
  p.prior_offset = static_cast<int32_t>(prior_offset);
  p.page_size = page_table ? static_cast<int32_t>(page_size) : 0;
  p.pages_per_request = page_table ? clamped(page_table->size(1)) : 0;
  p.dtype = dtype;
  return p;
}

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&value, attribute, device);
  check(status == cudaSuccess, "cannot query the device: ", cudaGetErrorString(status));
  return value;
}

void check_plan(const PlanInput& input) {
  const PlanProblem problem = plan_problem(input);
  if (problem == PlanProblem::kNone) return;
  check(problem != PlanProblem::kMaxCtas, "max_ctas: want 0, 1, 2, 4, 8 or 16, got ", input.max_ctas);
  check(problem != PlanProblem::kCtasAboveMax, "ctas_per_row: want at most max_ctas = ", input.max_ctas,
        ", got ", input.forced_ctas);
  check(problem != PlanProblem::kCtas,
        "ctas_per_row: want 0, 1, 2, 4, 8 or 16 and enough for the width, got ", input.forced_ctas);
  check(problem != PlanProblem::kFourPhaseK, "k: want 512, 1024 or 2048 for path 'gvr', got ", input.k);
  check(problem != PlanProblem::kFourPhaseWidth, "logits: want at most ", kFourPhaseMaxWidth,
        " columns for path 'gvr', got ", input.width);
  check(problem != PlanProblem::kFourPhaseArch,
        "path: want 'cluster' or 'radix' on compute capability 12, got 'gvr'");
}

// The plan, with the largest clusters not above the planned size that the stream's context can run. A forced
// size is not changed, and a row that fewer CTAs cannot hold has no smaller plan.
Plan runnable_plan(const TopkParams& params, PlanInput input, cudaStream_t stream,
                   const StreamContext& context) {
  Plan plan = make_plan(input);
  while (plan.ctas_per_row > 1 && !can_run(params, plan, stream, context)) {
    const int32_t before = plan.ctas_per_row;
    check(input.forced_ctas == 0, "ctas_per_row: want a cluster size that the ", context.sm_count,
          " SMs of the stream's context can run, got ", before);
    input.max_ctas = before / 2;
    plan = make_plan(input);
    check(plan.ctas_per_row < before, "logits: want a stream whose context can run clusters of ", before,
          " CTAs, which ", params.width, " columns need, got one of ", context.sm_count, " SMs");
  }
  return plan;
}

void indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor indices, OptionalTensor prior,
                         OptionalTensor row_slot, OptionalTensor guess_state, OptionalTensor stats,
                         OptionalTensor page_table, OptionalTensor phase_clocks, int64_t k, int64_t next_n,
                         int64_t prior_offset, int64_t page_size, int64_t path, int64_t ctas_per_row,
                         int64_t flags, int64_t max_ctas) {
  TopkParams params = make_params(logits, seq_lens, indices, prior, row_slot, guess_state, stats, page_table,
                                  phase_clocks, k, next_n, prior_offset, page_size);
  if (params.rows == 0) return;
  params.quantile_guess = (flags & kFlagQuantileGuess) != 0;
  check(path >= 0 && path <= static_cast<int64_t>(Path::kCluster), "path: want 0 to 3, got ", path);
  const int device = logits.get_device();
  const DeviceGuard guard(device);
  void* handle = nullptr;
  check(aoti_torch_get_current_cuda_stream(device, &handle) == 0, "no current CUDA stream");
  const auto stream = static_cast<cudaStream_t>(handle);
  const StreamContext context =
      context_of(stream, device, device_attribute(cudaDevAttrMultiProcessorCount, device));
  PlanInput input{};
  input.rows = params.rows;
  input.width = params.width;
  input.k = params.k;
  input.dtype = params.dtype;
  input.path = static_cast<Path>(path);
  input.sm_count = context.sm_count;
  input.arch = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
               device_attribute(cudaDevAttrComputeCapabilityMinor, device);
  input.forced_ctas = clamped(ctas_per_row);
  input.max_ctas = clamped(max_ctas);
  check(input.arch >= kMinArch, "logits: want a GPU of compute capability 9.0 or later, got ",
        input.arch / 10, ".", input.arch % 10);
  check_plan(input);
  const Plan plan = runnable_plan(params, input, stream, context);
  const bool pdl = (flags & kFlagPdl) != 0;
  const cudaError_t status = launch(params, plan, pdl, stream);
  check(status == cudaSuccess, "launch of ", plan.ctas_per_row, " CTAs per row on ", context.sm_count,
        " SMs failed: ", cudaGetErrorString(status));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_decode", TORCH_BOX(&gvr_topk::indexer_topk_decode));
}
