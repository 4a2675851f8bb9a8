// The compiled checks of the ops as ops of their own, for CPU tensors: tests/cpu/test_compiled_checks.py
// builds this file and compares what the checks say with what Python's say. They run nothing.
#include <torch/csrc/stable/library.h>

#include "arguments.h"

namespace gvr_topk {
namespace {

void indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor out, int64_t k, OptionalTensor row_slot,
                         OptionalTensor state, OptionalTensor indices, OptionalTensor next_state,
                         OptionalTensor counts, OptionalTensor page_table, OptionalTensor slots,
                         OptionalTensor stats, OptionalTensor phase_clocks, int64_t next_n, int64_t page_size,
                         int64_t path, int64_t max_ctas, int64_t flags, int64_t hint_offset,
                         int64_t ctas_per_row, int64_t compress_ratio) {
  const CheckedOp op("indexer_topk_decode");
  check_arguments(DecodeArguments{logits,       seq_lens,     out,           k,          row_slot, state,
                                  indices,      next_state,   counts,        page_table, slots,    stats,
                                  phase_clocks, next_n,       page_size,     path,       max_ctas, flags,
                                  hint_offset,  ctas_per_row, compress_ratio});
}

void indexer_topk_prefill(Tensor logits, Tensor row_starts, Tensor row_ends, Tensor out, int64_t k,
                          OptionalTensor row_request, OptionalTensor offsets, OptionalTensor counts,
                          OptionalTensor page_table, OptionalTensor slots, OptionalTensor stats,
                          int64_t page_size, int64_t path, int64_t flags) {
  const CheckedOp op("indexer_topk_prefill");
  check_arguments(PrefillArguments{logits, row_starts, row_ends, out, k, row_request, offsets, counts,
                                   page_table, slots, stats, page_size, path, flags});
}

void indexer_topk_blocks(Tensor logits, Tensor seq_lens, Tensor out, Tensor blocks, int64_t k,
                         int64_t block_k, int64_t next_n, int64_t flags, int64_t compress_ratio,
                         int64_t block_size) {
  const CheckedOp op("indexer_topk_blocks");
  check_chosen(BlocksArguments{logits, seq_lens, out, blocks, k, next_n, flags, compress_ratio, block_size},
               block_k);
}

void indexer_topk_in_blocks(Tensor logits, Tensor seq_lens, Tensor blocks, Tensor out, int64_t k,
                            int64_t next_n, int64_t flags, int64_t compress_ratio, int64_t block_size) {
  const CheckedOp op("indexer_topk_in_blocks");
  check_given(BlocksArguments{logits, seq_lens, out, blocks, k, next_n, flags, compress_ratio, block_size});
}

}  // namespace
}  // namespace gvr_topk

STABLE_TORCH_LIBRARY_IMPL(gvr_topk_checks, CPU, m) {
  m.impl("indexer_topk_decode", TORCH_BOX(&gvr_topk::indexer_topk_decode));
  m.impl("indexer_topk_prefill", TORCH_BOX(&gvr_topk::indexer_topk_prefill));
  m.impl("indexer_topk_blocks", TORCH_BOX(&gvr_topk::indexer_topk_blocks));
  m.impl("indexer_topk_in_blocks", TORCH_BOX(&gvr_topk::indexer_topk_in_blocks));
}
