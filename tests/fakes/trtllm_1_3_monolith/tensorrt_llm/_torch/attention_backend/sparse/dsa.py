from typing import Optional

import torch
from fake_base import IndexerBase, KVCacheManager, MonolithMetadata

from tensorrt_llm.llmapi import llm_args  # noqa: F401  (as the real module does)


class DSAtrtllmAttentionMetadata(MonolithMetadata):
    def prepare(self):
        super().prepare()


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
        super().__init__(sparse_attention_config, layer_idx, aux_stream)

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
    ) -> torch.Tensor:
        return self.select_rows(metadata, hidden_states, q_fp8, weights, None)

    def decode_topk(self, metadata, logits, lengths, indices, next_n):
        if self._use_cute_dsl_topk:
            torch.ops.trtllm.cute_dsl_indexer_topk_decode(logits, lengths, indices, self.index_topk, next_n)
        else:
            torch.ops.trtllm.indexer_topk_decode(logits, lengths, indices, next_n, self.index_topk)


class DSACacheManager(KVCacheManager):
    def get_indexer_k_cache_buffers(self, layer_idx: int):
        return self.pool[self.layer_offsets[layer_idx]]
