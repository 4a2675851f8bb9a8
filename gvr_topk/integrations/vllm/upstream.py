"""The one table of what the integration assumes about vLLM.

The table describes the sources of vLLM 0.33. `gvr_topk.integrations._kit.signatures` compares it with what is
installed, and one difference is enough to leave all of vLLM as it is.
"""

from __future__ import annotations

from dataclasses import replace

from gvr_topk.integrations._kit.engine import Engine
from gvr_topk.integrations._kit.environment import (
    ENABLE_DCP,
    ENABLE_SAMPLER,
    ENABLE_SLICES,
    ENABLE_VLLM,
    Mode,
)
from gvr_topk.integrations._kit.signatures import PatchPoint

ENGINE = Engine("vLLM", "vllm", ENABLE_VLLM, Mode.ON, ("0.33",), "vllm.general_plugins")

TOP_K_MODULE = "vllm.model_executor.layers.indexer_topk"
INDEXER_MODULE = "vllm.model_executor.layers.sparse_attn_indexer"
BUILDER_MODULE = "vllm.v1.attention.backends.mla.indexer"
ATTENTION_MODULE = "vllm.models.deepseek_v32.attention"
CONTEXT_MODULE = "vllm.forward_context"

OUTPUTS_MODULE = "vllm.v1.outputs"
SAMPLER_MODULE = "vllm.v1.worker.gpu.sample.sampler"
REJECTION_MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
SAMPLER_MODULES = (
    SAMPLER_MODULE,
    REJECTION_MODULE,
    "vllm.v1.worker.gpu.sample.prompt_logprob",
)
"""Modules of the V2 model runner that call `TOPK_SCORES`, each by a name of its own."""

V1_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
"""Module of the V1 model runner, which vLLM imports in its place, and whose sampler is another one."""

AUTO = "auto"
"""Value of ``kernel_config.sparse_indexer_topk_backend`` with which vLLM chooses its top-k itself."""

TOP_K = PatchPoint(
    "SparseIndexerTopk.forward",
    "method",
    TOP_K_MODULE,
    ("self", "logits", "seq_lens", "next_n", "topk_indices", "topk_tokens", "max_seq_len"),
    "wrapped: runs our op; the original stays as the fallback",
    more="none",
)
PREFILL = PatchPoint(
    "torch.ops._C.top_k_per_row_prefill",
    "op",
    INDEXER_MODULE,
    ("logits", "rowStarts", "rowEnds", "indices", "numRows", "stride0", "stride1", "topK"),
    "replaced: runs our op for each chunk of prompts; the original stays as the fallback",
    more="none",
)
BUILD = PatchPoint(
    "DeepseekV32IndexerMetadataBuilder.build",
    "method",
    BUILDER_MODULE,
    ("self", "common_prefix_len", "common_attn_metadata"),
    "wrapped: says once per step which request each row belongs to",
)
INDEXER = PatchPoint(
    "sparse_attn_indexer",
    "function",
    INDEXER_MODULE,
    ("hidden_states", "k_cache_prefix"),
    f"wrapped where {ATTENTION_MODULE} calls it: names the layer",
    more="any",
)
RESOLVE = PatchPoint(
    "_resolve_layer_name",
    "function",
    INDEXER_MODULE,
    ("layer_name",),
    "wrapped: names the layer where the indexer runs as torch.ops.vllm.sparse_attn_indexer",
    more="any",
)
CANDIDATES = PatchPoint(
    "select_candidate_blocks",
    "function",
    "vllm.model_executor.kernels.attention.dsa.candidate_blocks",
    ("logits", "row_ks", "row_ke", "topk_blocks", "block_size", "out", "row_repeat"),
    f"wrapped where {INDEXER_MODULE} calls it; the original stays as the fallback",
)
CALLED_CANDIDATES = replace(CANDIDATES, name=f"_{CANDIDATES.name}")
_UNLESS = "wrapped, unless {}=0,".format
SPLIT = PatchPoint(
    "DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks",
    "method",
    BUILDER_MODULE,
    (
        *("compressed_seq_lens_cpu", "prefill_query_lens_cpu", "workspace_size", "max_logits_bytes"),
        "request_offset",
    ),
    f"{_UNLESS(ENABLE_SLICES)} so that chunks of long prompts fill the GPU",
)
SCORES = PatchPoint(
    "fp8_fp4_mqa_logits",
    "function",
    "vllm.utils.deep_gemm",
    ("q", "kv", "weights", "cu_seqlen_ks", "cu_seqlen_ke", "max_seqlen_k"),
    f"{_UNLESS(ENABLE_SLICES)} where {INDEXER_MODULE} calls it: scores those chunks in slices",
    more="none",
)
MERGE = PatchPoint(
    "_merge_dcp_topk_global",
    "function",
    INDEXER_MODULE,
    ("logits", "topk_indices", "topk_tokens", "dcp_rank", "dcp_world_size", "cp_interleave", "row_starts"),
    f"with {ENABLE_DCP}=1 wrapped: ranks agree on the k-th score; the original stays as the fallback",
)
TOPK_SCORES = PatchPoint(
    "compute_topk_scores",
    "function",
    "vllm.v1.worker.gpu.sample.logprob",
    (
        *("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logprob_token_ids_state"),
        *("expanded_idx_mapping", "max_per_req_token_ids", "logits_mode"),
    ),
    f"{_UNLESS(ENABLE_SAMPLER)} where the V2 model runner calls it; the original stays as the fallback",
)
SAMPLE = PatchPoint(
    "Sampler.sample",
    "method",
    SAMPLER_MODULE,
    (
        *("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids"),
        *("expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs"),
    ),
    f"{_UNLESS(ENABLE_SAMPLER)} and draws with our op; the original stays as the fallback",
)
VERIFY_DRAFTS = PatchPoint(
    "RejectionSampler._verify",
    "method",
    REJECTION_MODULE,
    (
        *("self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping"),
        *("idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np"),
        "verify_draft_sampled",
    ),
    f"{_UNLESS(ENABLE_SAMPLER)} and verifies with our op; the original stays as the fallback",
)
MASKS = PatchPoint(
    "SamplingMaskTensors.from_logits",
    "method",
    "vllm.v1.worker.gpu.sample.output",
    ("logits", "cu_num_logits", "num_sampled_tokens", "max_num_kept", "rows_per_request"),
    f"{_UNLESS(ENABLE_SAMPLER)} and takes what the draw kept; the original stays as the fallback",
)
BUILDER_OBJECT = PatchPoint(
    "DeepseekV32IndexerMetadataBuilder()",
    "instance",
    "",
    ("layer_names", "vllm_config", "device"),
    "read when the state is allocated",
)
METADATA_OBJECT = PatchPoint(
    "DeepseekV32IndexerMetadata()",
    "instance",
    "",
    ("num_decodes", "decode"),
    "read once per step, on the host",
)
COMMON_OBJECT = PatchPoint(
    "CommonAttentionMetadata()",
    "instance",
    "",
    ("query_start_loc_cpu",),
    "read once per step, on the host; without req_idx there is no state",
)

POINTS = (TOP_K, PREFILL, BUILD, INDEXER, BUILDER_OBJECT, METADATA_OBJECT, COMMON_OBJECT)
"""All points that must be there, in the order in which they are reported. Without `CANDIDATES`,
`MERGE`, `TOPK_SCORES`, `SAMPLE`, `VERIFY_DRAFTS`, `MASKS`, or `SPLIT` and `SCORES`, only candidate blocks,
the merge of ranks, log-probabilities, draws, drafts, masks or chunks stay vLLM's own."""

WATCHED = (
    *(TOP_K_MODULE, INDEXER_MODULE, BUILDER_MODULE, ATTENTION_MODULE, *SAMPLER_MODULES),
    *(MASKS.module, V1_RUNNER_MODULE),
)
"""Modules that are patched, or noticed, after their import."""
