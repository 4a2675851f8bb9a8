from typing import Optional

import torch
from fake_base import IndexerBase


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
        super().__init__(sparse_params, layer_idx, aux_stream, compress_ratio)

    def sparse_attn_indexer(
        self,
        metadata,
        hidden_states: torch.Tensor,
        q_fp8: torch.Tensor,
        k_fp8: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        q_scale: Optional[torch.Tensor] = None,
        is_generation: Optional[bool] = None,
    ) -> torch.Tensor:
        return self.select_rows(metadata, hidden_states, q_fp8, weights, is_generation)

    def decode_topk(self, metadata, logits, lengths, indices, next_n):
        self.decode_by_op(metadata, logits, lengths, indices, next_n)
