// The checks of the ops' arguments, as gvr_topk/arguments.py has them for other devices. The arguments
// themselves, and the check of their memory, are generated from that file (op_arguments.h). Nothing here
// needs CUDA, so that a test compiles the checks on any machine and compares what they say with Python's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "check.h"
#include "flags.h"
#include "gvr_topk/params.h"
#include "gvr_topk/policy.h"
#include "memory.h"
#include "op_arguments.h"

namespace gvr_topk {

inline Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      check(false, "logits: wanted dtype float32, bfloat16 or float16, got ", name_of(logits.scalar_type()));
      return Dtype::kFloat32;
  }
}

// The nearest 32-bit number. A tensor may have more slots or pages than such a number counts. The ones beyond
// are never accessed, because slots and positions are 32-bit numbers themselves.
inline int32_t clamped(int64_t value) {
  using Limits = std::numeric_limits<int32_t>;
  return static_cast<int32_t>(std::clamp<int64_t>(value, Limits::min(), Limits::max()));
}

// ---------------------------------------------------------------- checks that the ops share

// Checks the scores, [rows, width] with inner stride 1, and the number of items per row.
inline void check_scores(const Tensor& logits, int64_t k) {
  dtype_of(logits);
  check(logits.dim() == 2, "logits: wanted shape [rows, width], got ", describe(logits));
  const int64_t rows = logits.size(0), width = logits.size(1);
  check(width <= 1 || logits.stride(1) == 1, "logits: wanted inner stride 1, got ", logits.stride(1));
  check(width <= kMaxWidth, "logits: wanted at most ", kMaxWidth, " columns, got ", width);
  check(rows <= kMaxRows, "logits: wanted at most ", kMaxRows, " rows, got ", rows);
  check(k >= 1 && k <= kMaxWidth, "k: wanted 1 to ", kMaxWidth, ", got ", k);
}

// Checks the lengths: one for each request, which has `next_n` rows, or one for each row.
inline void check_lengths(const Tensor& logits, const Tensor& seq_lens, int64_t next_n,
                          int64_t compress_ratio) {
  const int64_t rows = logits.size(0);
  check(next_n >= 1 && next_n <= kMaxNextN, "next_n: wanted 1 to ", kMaxNextN, ", got ", next_n);
  check(rows % next_n == 0, "logits: wanted a multiple of next_n = ", next_n, " rows, got ", rows);
  check(compress_ratio >= 1 && compress_ratio <= kMaxWidth, "compress_ratio: wanted 1 to ", kMaxWidth,
        ", got ", compress_ratio);
  check_tensor(seq_lens, "seq_lens", logits, ScalarType::Int, {kAny});
  const int64_t requests = rows / next_n, lengths = seq_lens.size(0);
  check(lengths == requests || lengths == rows, "seq_lens: wanted ", requests,
        requests == rows ? "" : " or " + std::to_string(rows), " elements, got ", describe(seq_lens));
}

// Checks the page table, which has `requests` rows, and the tensor for cache slots, if that is not `out`.
inline void check_pages(const OptionalTensor& page_table, const OptionalTensor& slots, int64_t page_size,
                        const Tensor& logits, int64_t requests, int64_t k) {
  if (slots) {
    check(page_table.has_value(), "slots: wanted a page_table beside it, got None");
    check_results(*slots, "slots", logits, logits.size(0), k);
  }
  check(page_table || page_size == 0, "page_size: wanted a page_table beside it, got None");
  if (!page_table) return;
  check_tensor(*page_table, "page_table", logits, ScalarType::Int, {requests, kAny});
  check(page_size >= 1 && page_size <= kMaxPageSize, "page_size: wanted 1 to ", kMaxPageSize,
        " with a page_table, got ", page_size);
}

// Checks an optional tensor without gaps that has `columns` numbers for each row.
inline void check_row_table(const OptionalTensor& t, const char* name, const Tensor& logits, ScalarType dtype,
                            int64_t columns) {
  if (!t) return;
  check_tensor(*t, name, logits, dtype, {logits.size(0), columns});
  check_contiguous(*t, name);
}

inline void check_counts_and_stats(const OptionalTensor& counts, const OptionalTensor& stats,
                                   const Tensor& logits) {
  if (counts) check_tensor(*counts, "counts", logits, ScalarType::Int, {logits.size(0)});
  check_row_table(stats, "stats", logits, ScalarType::Int, kStatColumns);
}

inline void check_flags(int64_t flags, int64_t known) {
  check((flags & ~known) == 0, "flags: wanted no bits outside of ", known, ", got ", flags);
}

// Checks that kernels can read and write a tensor of states 16 bytes at a time.
inline void check_states(const Tensor& states, const char* name) {
  check_contiguous(states, name);
  check(reinterpret_cast<uintptr_t>(states.data_ptr()) % 16 == 0, name,
        ": wanted an address that is a multiple of 16, got one that is not");
}

// ---------------------------------------------------------------- decode

inline void check_state(const DecodeArguments& a, int64_t requests) {
  if (a.row_slot) {
    check(a.state.has_value(), "row_slot: wanted a state beside it, got None");
    check_tensor(*a.row_slot, "row_slot", a.logits, ScalarType::Int, {a.logits.size(0)});
  }
  check(a.state || !a.indices, "indices: wanted a state beside them, got None");
  if (!a.state) return;
  check_tensor(*a.state, "state", a.logits, ScalarType::Float, {kAny, kStateFloats});
  check_states(*a.state, "state");
  const int64_t slots = a.state->size(0);
  check(a.row_slot || slots >= requests, "state: wanted at least ", requests, " slots without row_slot, got ",
        slots);
  if (!a.indices) return;
  check_tensor(*a.indices, "state.indices", a.logits, ScalarType::Int, {slots, a.k});
  check_rows_apart(*a.indices, "state.indices", a.k);
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

// Refuses arguments with undefined effect on the device.
inline void check_arguments(const DecodeArguments& a) {
  check_scores(a.logits, a.k);
  check_lengths(a.logits, a.seq_lens, a.next_n, a.compress_ratio);
  const int64_t rows = a.logits.size(0), requests = rows / a.next_n;
  check_results(a.out, "out", a.logits, rows, a.k);
  check_state(a, requests);
  check_row_table(a.next_state, "next_state", a.logits, ScalarType::Float, kStateFloats);
  if (a.next_state) check_states(*a.next_state, "next_state");
  check_pages(a.page_table, a.slots, a.page_size, a.logits, requests, a.k);
  check(a.page_table || (a.flags & kFlagClampPages) == 0,
        "clamp_pages: wanted a page_table beside it, got None");
  check_counts_and_stats(a.counts, a.stats, a.logits);
  check_row_table(a.phase_clocks, "phase_clocks", a.logits, ScalarType::Long, kPhaseStamps);
  check(a.hint_offset >= -kMaxWidth && a.hint_offset <= kMaxWidth, "hint_offset: wanted -", kMaxWidth, " to ",
        kMaxWidth, ", got ", a.hint_offset);
  check(a.path >= 0 && a.path <= static_cast<int64_t>(Path::kRadixRounds), "path: wanted 0 to ",
        static_cast<int64_t>(Path::kRadixRounds), ", got ", a.path);
  check_flags(a.flags, kFlagPdl | kFlagQuantileGuess | kFlagClampPages | kFlagDropMasked);
  check_plan(a, plan_input(a));
  check_memory(a);
}

// ---------------------------------------------------------------- prefill

// The number of requests of a call of the prefill op. The page table and the offsets have one row for each.
template <typename Arguments>
int64_t requests_of(const Arguments& a) {
  if (!a.row_request) return a.logits.size(0);
  return a.page_table ? a.page_table->size(0) : a.offsets ? a.offsets->size(0) : 0;
}

// Checks scores, windows and tables, and the tensors for results beside the statistics.
template <typename Arguments>
void check_windows(const Arguments& a, const OptionalTensor& out) {
  check_scores(a.logits, a.k);
  const int64_t rows = a.logits.size(0);
  check_tensor(a.row_starts, "row_starts", a.logits, ScalarType::Int, {rows});
  check_tensor(a.row_ends, "row_ends", a.logits, ScalarType::Int, {rows});
  if (out) check_results(*out, "out", a.logits, rows, a.k);
  int64_t requests = rows;
  if (a.row_request) {
    check(a.page_table || a.offsets, "row_request: wanted a page_table or offsets beside it, got None");
    check_tensor(*a.row_request, "row_request", a.logits, ScalarType::Int, {rows});
    requests = kAny;
  }
  check_pages(a.page_table, a.slots, a.page_size, a.logits, requests, a.k);
  if (a.offsets) {
    check(!a.page_table || a.slots,
          "offsets: wanted slots beside page_table, so that out keeps positions, got None");
    if (a.page_table) requests = a.page_table->size(0);
    check_tensor(*a.offsets, "offsets", a.logits, ScalarType::Int, {requests});
  }
}

// Refuses arguments with undefined effect on the device.
inline void check_arguments(const PrefillArguments& a) {
  check_windows(a, a.out);
  check_counts_and_stats(a.counts, a.stats, a.logits);
  const auto wanted = {static_cast<int64_t>(Path::kAuto), static_cast<int64_t>(Path::kRadixRounds)};
  check(std::count(wanted.begin(), wanted.end(), a.path) == 1, "path: wanted ", *wanted.begin(), " or ",
        *(wanted.end() - 1), ", got ", a.path);
  check_flags(a.flags, kFlagPdl | kFlagStreams);
  check_memory(a);
}

// Refuses arguments with undefined effect on the device, in a call on a slice.
inline void check_arguments(const PrefillSliceArguments& a) {
  check_windows(a, a.out);
  check_counts_and_stats(a.counts, std::nullopt, a.logits);
  check(a.out || !a.offsets, "offsets: wanted an out beside it, got None");
  check(a.out || !a.counts, "counts: wanted an out beside it, got None");
  check(a.out || !a.page_table, "page_table: wanted an out beside it, got None");
  check_tensor(a.carry, "carry", a.logits, ScalarType::Long, {kAny, a.k + 1});
  check_contiguous(a.carry, "carry");
  const int64_t rows = a.logits.size(0), last = kMaxWidth - a.logits.size(1);
  check(a.carry.size(0) >= rows, "carry: wanted at least ", rows, " rows, got ", a.carry.size(0));
  check(a.column >= 0 && a.column <= last, "column: wanted 0 to ", last, " for ", a.logits.size(1),
        " columns, got ", a.column);
  check_flags(a.flags, kFlagPdl);
  check_memory(a);
}

// ---------------------------------------------------------------- blocks

template <typename Arguments>
void check_both(const Arguments& a) {
  check_scores(a.logits, a.k);
  check(a.block_size == kBlockSize, "block_size: wanted ", kBlockSize, ", got ", a.block_size);
  check_lengths(a.logits, a.seq_lens, a.next_n, a.compress_ratio);
  check_results(a.out, "out", a.logits, a.logits.size(0), a.k);
  check_flags(a.flags, kFlagPdl);
}

// Refuses arguments with undefined effect on the device, in a call that chooses blocks.
inline void check_arguments(const BlocksArguments& a) {
  check_both(a);
  const int64_t width = a.logits.size(1);
  check(width <= kMaxBlocksWidth, "logits: wanted at most ", kMaxBlocksWidth, " columns, got ", width);
  check(blocks_hold_topk(a.k, a.block_k) && a.block_k <= kMaxChosenBlocks,
        "block_k: wanted more than k = ", a.k, " and at most ", kMaxChosenBlocks, ", got ", a.block_k);
  check_results(a.blocks, "blocks", a.logits, a.logits.size(0), a.block_k, "block_k");
  check_memory(a);
}

// Refuses arguments with undefined effect on the device, in a call that gives blocks.
inline void check_arguments(const InBlocksArguments& a) {
  check_both(a);
  check_tensor(a.blocks, "blocks", a.logits, ScalarType::Int, {a.logits.size(0), kAny});
  check(a.blocks.size(1) <= kMaxChosenBlocks, "blocks: wanted at most ", kMaxChosenBlocks, " columns, got ",
        a.blocks.size(1));
  check_memory(a);
}

}  // namespace gvr_topk
