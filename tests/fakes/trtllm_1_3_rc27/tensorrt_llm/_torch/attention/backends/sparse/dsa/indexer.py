from typing import Optional

import torch
from fake_base import IndexerBase
from tensorrt_llm._torch.modules.top_k import TopK, TopKImplementation


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
        implementation = TopKImplementation.CUDA_RADIX
        if self._enable_heuristic_topk:
            implementation = TopKImplementation.CUTE_DSL_GVR
        elif self._use_cute_dsl_topk:
            implementation = TopKImplementation.CUTE_DSL_RADIX
        self.top_k = TopK(
            self.index_topk, decode_implementation=implementation, compress_ratio=compress_ratio
        )

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
        layer = metadata.kv_cache_manager.layer_offsets[self.layer_idx]
        self.top_k(
            logits,
            indices,
            is_prefill=False,
            sequence_lengths=lengths,
            scan_lengths=lengths // self.compress_ratio,
            next_n=next_n,
            max_seq_len=metadata.get_indexer_max_seq_len(),
            gvr_ext_kwargs={"gvr_prior_indices": metadata.heuristic_prev_topk[layer]},
        )
