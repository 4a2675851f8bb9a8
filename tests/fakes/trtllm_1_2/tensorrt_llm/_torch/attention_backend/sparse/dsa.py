import torch
from fake_base import IndexerBase, KVCacheManager, fp8_paged_mqa_logits, prefill_topk

from gvr_topk.contract import row_lengths
from tensorrt_llm._torch.attention_backend.trtllm import TrtllmAttentionMetadata
from tensorrt_llm.llmapi import llm_args  # noqa: F401  (as the real module does)


class DSAtrtllmAttentionMetadata(TrtllmAttentionMetadata):
    max_draft_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.sparse_mla_topk = self.sparse_attention_config.index_topk

    def prepare(self):
        super().prepare()
        skip = self.sparse_attention_config.skip_indexer_for_short_seqs
        gen_lens = self.kv_lens[self.num_contexts :]
        self.skip_indexer_for_gen_reqs = (
            skip and len(gen_lens) > 0 and int(gen_lens.max()) <= self.sparse_mla_topk
        )


class Indexer(IndexerBase):
    def __init__(
        self,
        quant_config,
        pos_embd_params,
        mla_params,
        skip_create_weights_in_init,
        sparse_attention_config,
        dtype,
        layer_idx=0,
        aux_stream=None,
    ):
        super().__init__()
        self.index_topk = sparse_attention_config.index_topk
        self.layer_idx = layer_idx
        self.aux_stream = aux_stream

    def sparse_attn_indexer(
        self,
        metadata: DSAtrtllmAttentionMetadata,
        hidden_states: torch.Tensor,
        q_fp8: torch.Tensor,
        k_fp8: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        use_custom_topk: bool = True,
    ) -> torch.Tensor:
        num_contexts, num_generations = metadata.num_contexts, metadata.num_generations
        num_ctx_tokens = metadata.num_ctx_tokens
        num_gen_tokens = metadata.num_tokens - num_ctx_tokens
        topk_indices_buffer = torch.empty(
            (hidden_states.shape[0], self.index_topk), dtype=torch.int32, device=hidden_states.device
        )
        if num_contexts > 0 and not metadata.skip_indexer_for_ctx_reqs:
            prefill_topk(self, metadata, q_fp8, weights, topk_indices_buffer)
        if num_generations > 0 and not metadata.skip_indexer_for_gen_reqs:
            next_n = num_gen_tokens // num_generations
            rows = slice(num_ctx_tokens, num_ctx_tokens + num_gen_tokens)
            gen = slice(num_contexts, num_contexts + num_generations)
            gen_kv_lens_cuda = metadata.kv_lens_cuda_runtime[gen]
            logits_decode = fp8_paged_mqa_logits(
                q_fp8[rows].view(num_generations, next_n, *q_fp8.shape[1:]),
                metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx),
                weights[rows],
                gen_kv_lens_cuda,
                metadata.indexer_k_cache_block_offsets[gen],
                metadata.kv_cache_manager.max_seq_len,
            )
            torch.ops.trtllm.indexer_topk_decode(
                logits_decode,
                gen_kv_lens_cuda,
                topk_indices_buffer[num_ctx_tokens : num_ctx_tokens + num_gen_tokens, :],
                next_n,
            )
        elif num_generations > 0:
            next_n = num_gen_tokens // num_generations
            lens = row_lengths(metadata.kv_lens_cuda_runtime[num_contexts:], num_gen_tokens, next_n)
            dense = torch.arange(self.index_topk, dtype=torch.int32, device=hidden_states.device)
            topk_indices_buffer[num_ctx_tokens:] = torch.where(dense < lens[:, None], dense, -1)
        return topk_indices_buffer


class DSACacheManager(KVCacheManager):
    def get_indexer_k_cache_buffers(self, layer_idx: int):
        return self.pool[self.layer_offsets[layer_idx]]
