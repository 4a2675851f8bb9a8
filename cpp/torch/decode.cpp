// The CUDA implementation of torch.ops.gvr_topk.indexer_topk_decode over libtorch's stable ABI. The schema,
// the fake kernel and the CPU implementation are in Python (gvr_topk/arguments.py, ops.py, cpu.py).
#include <torch/csrc/stable/library.h>

#include "call.h"
#include "gvr_topk/launch.h"

namespace gvr_topk {
namespace {

// The arguments of one call, in the order of the schema (gvr_topk/arguments.py).
struct Arguments {
  const Tensor& logits;
  const Tensor& seq_lens;
  const Tensor& out;
  int64_t k;
  const OptionalTensor& row_slot;
  const OptionalTensor& state;
  const OptionalTensor& indices;
  const OptionalTensor& next_state;
  const OptionalTensor& counts;
  const OptionalTensor& page_table;
  const OptionalTensor& slots;
  const OptionalTensor& stats;
  const OptionalTensor& phase_clocks;
  int64_t next_n;
  int64_t page_size;
  int64_t path;
  int64_t max_ctas;
  int64_t flags;
  int64_t hint_offset;
  int64_t ctas_per_row;
  int64_t compress_ratio;
};

// Checks a tensor of states, which kernels read and write 16 bytes at a time.
void check_states(const Tensor& states, const char* name, int32_t device, int64_t rows) {
  check_tensor(states, name, device, ScalarType::Float, {rows, kStateFloats});
  check_contiguous(states, name);
  check(reinterpret_cast<uintptr_t>(states.data_ptr()) % 16 == 0, name,
        ": wanted an address that is a multiple of 16, got one that is not");
}

void check_state(const Arguments& a, int32_t device, int64_t rows, int64_t requests) {
  if (a.row_slot) {
    check(a.state.has_value(), "row_slot: wanted a state beside it, got None");
    check_tensor(*a.row_slot, "row_slot", device, ScalarType::Int, {rows});
  }
  check(a.state || !a.indices, "indices: wanted a state beside them, got None");
  if (!a.state) return;
  check_states(*a.state, "state", device, kAny);
  const int64_t slots = a.state->size(0);
  check(a.row_slot || slots >= requests, "state: wanted at least ", requests, " slots without row_slot, got ",
        slots);
  if (!a.indices) return;
  check_tensor(*a.indices, "state.indices", device, ScalarType::Int, {slots, a.k});
  check_rows_apart(*a.indices, "state.indices", a.k);
}

// Refuses arguments with undefined effect on the device, as gvr_topk/arguments.py does elsewhere.
void check_arguments(const Arguments& a) {
  check_logits(a.logits);
  const int32_t device = a.logits.get_device();
  const int64_t rows = a.logits.size(0);
  check_k(a.k);
  check_lengths(a.logits, a.seq_lens, a.next_n, a.compress_ratio);
  const int64_t requests = rows / a.next_n;
  check_results(a.out, "out", device, rows, a.k);
  check_state(a, device, rows, requests);
  if (a.next_state) check_states(*a.next_state, "next_state", device, rows);
  check_pages(a.page_table, a.slots, a.page_size, device, rows, requests, a.k);
  check(a.page_table || (a.flags & kFlagClampPages) == 0,
        "clamp_pages: wanted a page_table beside it, got None");
  check_counts_and_stats(a.counts, a.stats, device, rows);
  if (a.phase_clocks) {
    check_tensor(*a.phase_clocks, "phase_clocks", device, ScalarType::Long, {rows, kPhaseStamps});
    check_contiguous(*a.phase_clocks, "phase_clocks");
  }
  check(a.hint_offset >= -kMaxWidth && a.hint_offset <= kMaxWidth, "hint_offset: wanted -", kMaxWidth, " to ",
        kMaxWidth, ", got ", a.hint_offset);
  check(a.path >= 0 && a.path <= static_cast<int64_t>(Path::kRadixRounds), "path: wanted 0 to ",
        static_cast<int64_t>(Path::kRadixRounds), ", got ", a.path);
}

// Columns from which rows may select: only those that the page table covers, if the call asks for that.
// Kernels treat the rest of a row as space between two rows, so the limit costs them nothing.
int32_t selectable_width(const Arguments& a) {
  const int64_t width = a.logits.size(1);
  if (!a.page_table || (a.flags & kFlagClampPages) == 0) return static_cast<int32_t>(width);
  const int64_t pages = std::min(a.page_table->size(1), kMaxWidth);  // More pages would only overflow.
  return static_cast<int32_t>(std::min(width, pages * a.page_size));
}

TopkParams make_params(const Arguments& a) {
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
  p.phase_clocks = pointer<int64_t>(a.phase_clocks);
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

void check_plan(const PlanInput& input) {
  const PlanProblem problem = plan_problem(input);
  if (problem == PlanProblem::kNone) return;
  check(problem != PlanProblem::kMaxCtas, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got ", input.max_ctas);
  check(problem != PlanProblem::kCtasAboveMax, "ctas_per_row: wanted at most max_ctas = ", input.max_ctas,
        ", got ", input.forced_ctas);
  check(problem != PlanProblem::kCtas,
        "ctas_per_row: wanted 0, 1, 2, 4, 8 or 16 and enough for the width, got ", input.forced_ctas);
  check(problem != PlanProblem::kPaperK, "k: wanted 512, 1024 or 2048 for path 'paper_gvr', got ", input.k);
  check(problem != PlanProblem::kPaperWidth, "logits: wanted at most ", kPaperMaxWidth,
        " columns for path 'paper_gvr', got ", input.width);
  check(problem != PlanProblem::kPaperArch,
        "path: wanted any but 'paper_gvr' on compute capability 12, got 'paper_gvr'");
}

// The plan with the largest clusters that the stream's context can run, up to the planned size. The call is
// refused if its size is forced and cannot run, or if fewer CTAs cannot hold a row.
Plan runnable_plan(const TopkParams& params, PlanInput input, cudaStream_t stream,
                   const StreamContext& context) {
  Plan plan = make_plan(input);
  while (plan.ctas_per_row > 1 && !can_run(params, plan, stream, context)) {
    const int32_t before = plan.ctas_per_row;
    check(input.forced_ctas == 0, "ctas_per_row: wanted a cluster size that the ", context.sm_count,
          " SMs of the stream's context can run, got ", before);
    input.max_ctas = before / 2;
    plan = make_plan(input);
    check(plan.ctas_per_row < before, "logits: wanted a stream whose context can run clusters of ", before,
          " CTAs, which ", params.width, " columns need, got one of ", context.sm_count, " SMs");
  }
  return plan;
}

void indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor out, int64_t k, OptionalTensor row_slot,
                         OptionalTensor state, OptionalTensor indices, OptionalTensor next_state,
                         OptionalTensor counts, OptionalTensor page_table, OptionalTensor slots,
                         OptionalTensor stats, OptionalTensor phase_clocks, int64_t next_n, int64_t page_size,
                         int64_t path, int64_t max_ctas, int64_t flags, int64_t hint_offset,
                         int64_t ctas_per_row, int64_t compress_ratio) {
  const Arguments arguments{logits,       seq_lens,     out,           k,          row_slot, state,
                            indices,      next_state,   counts,        page_table, slots,    stats,
                            phase_clocks, next_n,       page_size,     path,       max_ctas, flags,
                            hint_offset,  ctas_per_row, compress_ratio};
  const CheckedOp op("indexer_topk_decode");
  check_arguments(arguments);
  const TopkParams params = make_params(arguments);
  if (params.rows == 0) return;
  const int device = logits.get_device();
  const DeviceGuard guard(device);
  const CallTarget target(device);
  PlanInput input{};
  input.rows = params.rows;
  input.width = params.width;
  input.k = params.k;
  input.dtype = params.dtype;
  input.path = static_cast<Path>(path);
  input.sm_count = target.context.sm_count;
  input.arch = target.arch;
  input.forced_ctas = clamped(ctas_per_row);
  input.max_ctas = clamped(max_ctas);
  check_plan(input);
  const Plan plan = runnable_plan(params, input, target.stream, target.context);
  const bool pdl = (flags & kFlagPdl) != 0;
  const cudaError_t status = launch(params, plan, pdl, target.stream);
  require(status == cudaSuccess, "gvr_topk: launch of ", plan.ctas_per_row, " CTAs per row on ",
          target.context.sm_count, " SMs failed: ", cudaGetErrorString(status));
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk, CUDA, m) {
  m.impl("indexer_topk_decode", TORCH_BOX(&gvr_topk::indexer_topk_decode));
}
