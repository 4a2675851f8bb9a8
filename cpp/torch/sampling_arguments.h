// The checks of the sampler's functions, which a test compares with Python's as those of arguments.h.
#pragma once

#include "arguments.h"
#include "gvr_topk/sampling_arithmetic.h"

namespace gvr_topk {

// Checks the logits, [rows, vocabulary].
inline void check_logits(const Tensor& logits) {
  check_scores(logits, 1);
  const int64_t vocabulary = logits.size(1);
  check(vocabulary >= 1 && vocabulary <= sampling::kMaxVocabulary, "logits: wanted 1 to ",
        sampling::kMaxVocabulary, " columns, got ", vocabulary);
}

// Checks a tensor of one token for each row, of one of two dtypes.
inline void check_tokens(const Tensor& t, const char* name, const Tensor& logits) {
  const ScalarType dtype = t.scalar_type();
  check(dtype == ScalarType::Long || dtype == ScalarType::Int, name, ": wanted dtype int64 or int32, got ",
        name_of(dtype));
  check_tensor(t, name, logits, dtype, {logits.size(0)});
}

// Checks the packed mask of allowed tokens.
inline void check_mask(const OptionalTensor& allow, const OptionalTensor& allow_row, const Tensor& logits) {
  check(allow || !allow_row, "allow_row: wanted allow beside it, got None");
  if (!allow) return;
  const int64_t rows = logits.size(0), words = (logits.size(1) + 31) / 32;
  check_tensor(*allow, "allow", logits, ScalarType::Int, {allow_row ? kAny : rows, words});
  if (allow_row) check_tensor(*allow_row, "allow_row", logits, ScalarType::Int, {rows});
}

inline void check_limit_rows(const Tensor& limits, const Tensor& logits) {
  check_tensor(limits, "limits", logits, ScalarType::Int, {logits.size(0), 8});
  check_states(limits, "limits");
}

template <typename Arguments>
void check_limits(const Arguments& a) {
  check_logits(a.logits);
  check_limit_rows(a.limits, a.logits);
  check_mask(a.allow, a.allow_row, a.logits);
}

// Refuses arguments with undefined effect on the device.
inline void check_arguments(const ApplyLimitsArguments& a) {
  check_limits(a);
  check_rows_apart(a.logits, "logits", a.logits.size(1));
  check_memory(a);
}

inline void check_arguments(const RenormArguments& a) {
  check_limits(a);
  const int64_t rows = a.logits.size(0), vocabulary = a.logits.size(1);
  check_tensor(a.out, "out", a.logits, ScalarType::Float, {rows, vocabulary});
  check_rows_apart(a.out, "out", vocabulary);
  // Probabilities may take the place of the logits they are made of, one by one.
  const bool in_place = a.logits.scalar_type() == ScalarType::Float &&
                        a.out.data_ptr() == a.logits.data_ptr() &&
                        (rows <= 1 || a.out.stride(0) == a.logits.stride(0));
  RenormArguments others = a;
  if (in_place) others.logits = a.limits;
  check_memory(others);
}

inline void check_arguments(const TopkLogprobsArguments& a) {
  check_logits(a.logits);
  const int64_t rows = a.logits.size(0), columns = a.n + 1;
  check(a.n >= 0 && a.n <= a.logits.size(1), "n: wanted 0 to ", a.logits.size(1), ", got ", a.n);
  check_tokens(a.sampled, "sampled", a.logits);
  check_tensor(a.ids, "ids", a.logits, ScalarType::Long, {rows, columns});
  check_tensor(a.logprobs, "logprobs", a.logits, ScalarType::Float, {rows, columns});
  check_tensor(a.ranks, "ranks", a.logits, ScalarType::Long, {rows});
  check_rows_apart(a.ids, "ids", columns);
  check_rows_apart(a.logprobs, "logprobs", columns);
  check_memory(a);
}

}  // namespace gvr_topk
