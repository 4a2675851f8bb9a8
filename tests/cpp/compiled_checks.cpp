// The compiled checks of the ops as ops of their own, for CPU tensors: tests/cpu/test_compiled_checks.py
// builds this file and compares what the checks say with what Python's say. They run nothing.
#include <torch/csrc/stable/library.h>

#include "sampling_arguments.h"

namespace gvr_topk {
namespace {

void indexer_topk_decode(GivenTensor logits, GivenTensor seq_lens, GivenTensor out, int64_t k,
                         OptionalGivenTensor row_slot, OptionalGivenTensor state, int64_t next_n,
                         int64_t compress_ratio, int64_t flags, OptionalGivenTensor page_table,
                         int64_t page_size, OptionalGivenTensor slots, OptionalGivenTensor indices,
                         OptionalGivenTensor next_state, OptionalGivenTensor counts,
                         OptionalGivenTensor stats, int64_t hint_offset, int64_t path, int64_t max_ctas,
                         int64_t ctas_per_row, OptionalGivenTensor phase_clocks) {
  const CheckedOp op("indexer_topk_decode");
  check_arguments(DecodeArguments{logits,   seq_lens,       out,         k,          row_slot,    state,
                                  next_n,   compress_ratio, flags,       page_table, page_size,   slots,
                                  indices,  next_state,     counts,      stats,      hint_offset, path,
                                  max_ctas, ctas_per_row,   phase_clocks});
}

void indexer_topk_prefill(GivenTensor logits, GivenTensor row_starts, GivenTensor row_ends, GivenTensor out,
                          int64_t k, OptionalGivenTensor row_request, OptionalGivenTensor offsets,
                          OptionalGivenTensor counts, OptionalGivenTensor page_table,
                          OptionalGivenTensor slots, OptionalGivenTensor stats, int64_t page_size,
                          int64_t path, int64_t flags) {
  const CheckedOp op("indexer_topk_prefill");
  check_arguments(PrefillArguments{logits, row_starts, row_ends, out, k, row_request, offsets, counts,
                                   page_table, slots, stats, page_size, path, flags});
}

void indexer_topk_prefill_slice(GivenTensor logits, GivenTensor row_starts, GivenTensor row_ends,
                                GivenTensor carry, int64_t k, int64_t column, OptionalGivenTensor out,
                                OptionalGivenTensor row_request, OptionalGivenTensor offsets,
                                OptionalGivenTensor counts, OptionalGivenTensor page_table,
                                OptionalGivenTensor slots, int64_t page_size, int64_t flags) {
  const CheckedOp op("indexer_topk_prefill");
  check_arguments(PrefillSliceArguments{logits, row_starts, row_ends, carry, k, column, out, row_request,
                                        offsets, counts, page_table, slots, page_size, flags});
}

void indexer_topk_blocks(GivenTensor logits, GivenTensor seq_lens, GivenTensor out, GivenTensor blocks,
                         int64_t k, int64_t block_k, int64_t next_n, int64_t flags, int64_t compress_ratio,
                         int64_t block_size) {
  const CheckedOp op("indexer_topk_blocks");
  check_chosen(BlocksArguments{logits, seq_lens, out, blocks, k, next_n, flags, compress_ratio, block_size},
               block_k);
}

void indexer_topk_in_blocks(GivenTensor logits, GivenTensor seq_lens, GivenTensor blocks, GivenTensor out,
                            int64_t k, int64_t next_n, int64_t flags, int64_t compress_ratio,
                            int64_t block_size) {
  const CheckedOp op("indexer_topk_in_blocks");
  check_given(BlocksArguments{logits, seq_lens, out, blocks, k, next_n, flags, compress_ratio, block_size});
}

void apply_limits(GivenTensor logits, GivenTensor limits, OptionalGivenTensor allow,
                  OptionalGivenTensor allow_row) {
  const CheckedOp op("apply_limits_");
  check_arguments(LimitsArguments{logits, limits, std::nullopt, allow, allow_row});
}

void renorm(GivenTensor logits, GivenTensor limits, GivenTensor out, OptionalGivenTensor allow,
            OptionalGivenTensor allow_row) {
  const CheckedOp op("renorm");
  check_arguments(LimitsArguments{logits, limits, out, allow, allow_row});
}

void topk_logprobs(GivenTensor logits, int64_t n, GivenTensor sampled, GivenTensor ids, GivenTensor logprobs,
                   GivenTensor ranks) {
  const CheckedOp op("topk_logprobs");
  check_arguments(TopkLogprobsArguments{logits, n, sampled, ids, logprobs, ranks});
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk_checks, CPU, m) {
  m.impl("indexer_topk_decode", TORCH_BOX(&gvr_topk::indexer_topk_decode));
  m.impl("indexer_topk_prefill", TORCH_BOX(&gvr_topk::indexer_topk_prefill));
  m.impl("indexer_topk_prefill_slice", TORCH_BOX(&gvr_topk::indexer_topk_prefill_slice));
  m.impl("indexer_topk_blocks", TORCH_BOX(&gvr_topk::indexer_topk_blocks));
  m.impl("indexer_topk_in_blocks", TORCH_BOX(&gvr_topk::indexer_topk_in_blocks));
  m.impl("apply_limits_", TORCH_BOX(&gvr_topk::apply_limits));
  m.impl("renorm", TORCH_BOX(&gvr_topk::renorm));
  m.impl("topk_logprobs", TORCH_BOX(&gvr_topk::topk_logprobs));
}
