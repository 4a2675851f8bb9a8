from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch
from fake_base import IndexerBase, fp8_paged_mqa_logits, prefill_topk

from tensorrt_llm._utils import get_sm_version

if TYPE_CHECKING:
    from .metadata import DSAtrtllmAttentionMetadata


class Indexer(IndexerBase):
    def __init__(
        self,
        quant_config,
        pos_embd_params,
        mla_params,
        skip_create_weights_in_init,
        sparse_params,
        dtype,
        compress_ratio=1,
        layer_idx=0,
        aux_stream=None,
    ):
        super().__init__()
        self.index_topk = sparse_params.index_topk
        self.layer_idx = layer_idx
        self.compress_ratio = compress_ratio
        self._enable_heuristic_topk = sparse_params.enable_heuristic_topk and get_sm_version() >= 100

    def sparse_attn_indexer(
        self,
        metadata: DSAtrtllmAttentionMetadata,
        hidden_states: torch.Tensor,
        q_fp8: torch.Tensor,
        k_fp8: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        use_custom_topk: bool = True,
        q_scale: Optional[torch.Tensor] = None,
        is_generation: Optional[bool] = None,
    ) -> torch.Tensor:
        num_contexts, num_generations = metadata.num_contexts, metadata.num_generations
        num_gen_tokens = metadata.num_tokens - metadata.num_ctx_tokens
        has_prefill = num_contexts > 0 and is_generation is not True
        has_decode = num_generations > 0 and is_generation is not False
        token_offset = metadata.num_ctx_tokens if is_generation is None else 0
        topk_indices_buffer = torch.empty(
            (hidden_states.shape[0], self.index_topk), dtype=torch.int32, device=hidden_states.device
        )
        if has_prefill:
            prefill_topk(self, metadata, q_fp8, weights, topk_indices_buffer)
        if has_decode:
            next_n = num_gen_tokens // num_generations
            rows = slice(token_offset, token_offset + num_gen_tokens)
            gen = slice(num_contexts, num_contexts + num_generations)
            gen_kv_lens_cuda = metadata.kv_lens_cuda_runtime[gen]
            logits_decode = fp8_paged_mqa_logits(
                q_fp8[rows].view(num_generations, next_n, *q_fp8.shape[1:]),
                metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx),
                weights[rows],
                gen_kv_lens_cuda,
                metadata.indexer_k_cache_block_offsets[gen],
                metadata.get_indexer_max_seq_len(),
            )
            local_layer = metadata.kv_cache_manager.layer_offsets[self.layer_idx]
            pre_idx = None
            if self._enable_heuristic_topk:
                pre_idx = metadata.heuristic_prev_topk[local_layer, :num_generations]
            torch.ops.trtllm.indexer_topk_decode(
                logits_decode,
                gen_kv_lens_cuda,
                topk_indices_buffer[token_offset : token_offset + num_gen_tokens, :],
                next_n,
                self.index_topk,
                pre_idx=pre_idx,
                heuristic_scratch=None,
                compress_ratio=self.compress_ratio,
                radix_aux_indices=None,
                radix_aux_logits=None,
            )
            if self._enable_heuristic_topk:
                decoded = topk_indices_buffer[token_offset : token_offset + num_gen_tokens]
                metadata.heuristic_prev_topk[local_layer, :num_generations] = decoded[next_n - 1 :: next_n]
        return topk_indices_buffer
