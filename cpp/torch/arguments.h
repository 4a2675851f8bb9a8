// The arguments of the ops. They and most of their checks are generated from gvr_topk/arguments.py
// (op_arguments.h); the other checks are here. Nothing here needs CUDA, so that a test compiles the checks on
// any machine and compares what they say with Python's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "flags.h"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"
#include "memory.h"
#include "op_arguments.h"

namespace gvr_topk {

// The dtype of scores that are checked.
inline Dtype dtype_of(const Tensor& logits) {
  if (logits.scalar_type() == ScalarType::BFloat16) return Dtype::kBfloat16;
  return logits.scalar_type() == ScalarType::Half ? Dtype::kFloat16 : Dtype::kFloat32;
}

// The nearest 32-bit number. A tensor may have more slots or pages than such a number counts. The ones beyond
// are never accessed, because slots and positions are 32-bit numbers themselves.
inline int32_t clamped(int64_t value) {
  using Limits = std::numeric_limits<int32_t>;
  return static_cast<int32_t>(std::clamp<int64_t>(value, Limits::min(), Limits::max()));
}

// Columns from which rows may select: only those that the page table covers, if the call asks for that.
// Kernels treat the rest of a row as space between two rows, so the limit costs them nothing.
inline int32_t selectable_width(const DecodeArguments& a) {
  const int64_t width = a.logits.size(1);
  if (!a.page_table || (a.flags & kFlagClampPages) == 0) return static_cast<int32_t>(width);
  const int64_t pages = std::min(a.page_table->size(1), kMaxWidth);  // More pages would only overflow.
  return static_cast<int32_t>(std::min(width, pages * a.page_size));
}

// The plan's input for a GPU that offers what the least restricted one does.
inline PlanInput plan_input(const DecodeArguments& a) {
  PlanInput input{};
  input.rows = a.logits.size(0);
  input.width = selectable_width(a);
  input.k = a.k;
  input.dtype = dtype_of(a.logits);
  input.path = static_cast<Path>(a.path);
  input.arch = kMinArch;
  input.forced_ctas = clamped(a.ctas_per_row);
  input.max_ctas = clamped(a.max_ctas);
  return input;
}

// Refuses what the plan refuses, for the GPU that `input` names.
inline void check_plan(const DecodeArguments& a, const PlanInput& input) {
  const PlanProblem problem = plan_problem(input);
  if (problem == PlanProblem::kNone) return;
  check(problem != PlanProblem::kMaxCtas, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got ", a.max_ctas);
  check(problem != PlanProblem::kCtasAboveMax, "ctas_per_row: wanted at most max_ctas = ", a.max_ctas,
        ", got ", a.ctas_per_row);
  check(problem != PlanProblem::kCtas,
        "ctas_per_row: wanted 0, 1, 2, 4, 8 or 16 and enough for the width, got ", a.ctas_per_row);
  check(problem != PlanProblem::kPaperK, "k: wanted 512, 1024 or 2048 for path 'paper_gvr', got ", a.k);
  check(problem != PlanProblem::kPaperWidth, "logits: wanted at most ", kPaperMaxWidth,
        " columns for path 'paper_gvr', got ", input.width);
  check(problem != PlanProblem::kPaperArch,
        "path: wanted any but 'paper_gvr' on compute capability 12, got 'paper_gvr'");
}

inline void check_plan(const DecodeArguments& a) { check_plan(a, plan_input(a)); }

// The number of requests of a call of the prefill op. The page table and the offsets have one row for each.
template <typename Arguments>
int64_t requests_of(const Arguments& a) {
  if (!a.row_request) return a.logits.size(0);
  return a.page_table ? a.page_table->size(0) : a.offsets ? a.offsets->size(0) : 0;
}

inline void check_arguments(const RenormArguments& a) {
  check_limits(a);
  const int64_t rows = a.logits.size(0), vocabulary = a.logits.size(1);
  check_tensor("out", a.out, a.logits, ScalarType::Float, {rows, vocabulary});
  check_rows_apart("out", a.out, vocabulary);
  // Probabilities may take the place of the logits they are made of, one by one.
  const bool in_place = a.logits.scalar_type() == ScalarType::Float &&
                        a.out.data_ptr() == a.logits.data_ptr() &&
                        (rows <= 1 || a.out.stride(0) == a.logits.stride(0));
  RenormArguments others = a;
  if (in_place) others.logits = a.limits;
  check_memory(others);
}

}  // namespace gvr_topk
