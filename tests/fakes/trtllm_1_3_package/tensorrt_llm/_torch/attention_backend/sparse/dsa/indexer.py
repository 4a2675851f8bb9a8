from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch
from fake_base import IndexerBase

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
        self.aux_stream = aux_stream
        self.compress_ratio = compress_ratio
        self._enable_heuristic_topk = sparse_params.enable_heuristic_topk and get_sm_version() >= 100
        self._use_cute_dsl_topk = sparse_params.use_cute_dsl_topk and get_sm_version() >= 100

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
        return self.select_rows(metadata, hidden_states, q_fp8, weights, is_generation)

    def decode_topk(self, metadata, logits, lengths, indices, next_n):
        if self._use_cute_dsl_topk and not self._enable_heuristic_topk:
            torch.ops.trtllm.cute_dsl_indexer_topk_decode(
                logits, lengths // self.compress_ratio, indices, self.index_topk, next_n
            )
            return
        layer = metadata.kv_cache_manager.layer_offsets[self.layer_idx]
        prior = metadata.heuristic_prev_topk[layer, : metadata.num_generations]
        torch.ops.trtllm.indexer_topk_decode(
            logits,
            lengths,
            indices,
            next_n,
            self.index_topk,
            pre_idx=prior if self._enable_heuristic_topk else None,
            heuristic_scratch=None,
            compress_ratio=self.compress_ratio,
            radix_aux_indices=None,
            radix_aux_logits=None,
        )
        if self._enable_heuristic_topk:
            prior.copy_(indices[next_n - 1 :: next_n])
