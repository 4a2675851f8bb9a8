// The compiled checks of the ops as ops of their own, for CPU tensors: tests/cpu/test_compiled_checks.py
// builds this file and compares what the checks say with what Python's say. They run nothing, and their
// messages have no op's name.
#include <torch/csrc/stable/library.h>

#include "arguments.h"

STABLE_TORCH_LIBRARY_IMPL(gvr_topk_checks, CPU, m) {
  using namespace gvr_topk;
  m.impl("indexer_topk_decode", TORCH_BOX(&DecodeArguments::call<&check_arguments>));
  m.impl("indexer_topk_prefill", TORCH_BOX(&PrefillArguments::call<&check_arguments>));
  m.impl("indexer_topk_prefill_slice", TORCH_BOX(&PrefillSliceArguments::call<&check_arguments>));
  m.impl("indexer_topk_blocks", TORCH_BOX(&BlocksArguments::call<&check_arguments>));
  m.impl("indexer_topk_in_blocks", TORCH_BOX(&InBlocksArguments::call<&check_arguments>));
  m.impl("topk_items", TORCH_BOX(&TopkItemsArguments::call<&check_arguments>));
  m.impl("apply_limits_", TORCH_BOX(&ApplyLimitsArguments::call<&check_arguments>));
  m.impl("renorm", TORCH_BOX(&RenormArguments::call<&check_arguments>));
  m.impl("topk_logprobs", TORCH_BOX(&TopkLogprobsArguments::call<&check_arguments>));
  m.impl("verify", TORCH_BOX(&VerifyArguments::call<&check_arguments>));
  m.impl("sharded_topk", TORCH_BOX(&ShardedArguments::call<&check_arguments>));
}
