import torch

from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer, sparse_attn_indexer


class DeepseekV32Attention(torch.nn.Module):
    def __init__(self, k_cache, topk_tokens, max_model_len, topk_indices_buffer, topk_backend="auto"):
        super().__init__()
        self.indexer_op = SparseAttnIndexer(
            k_cache, topk_tokens, max_model_len, topk_indices_buffer, topk_backend
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        op = self.indexer_op
        return sparse_attn_indexer(
            hidden_states,
            op.k_cache.prefix,
            op.k_cache.kv_cache,
            hidden_states,
            None,
            None,
            hidden_states,
            128,
            "ue8m0",
            op.topk_tokens,
            128,
            op.max_model_len,
            op.max_model_len,
            op.topk_indices_buffer,
            skip_k_cache_insert=True,
            use_pcp=False,
            pcp_shard_decode_requests=False,
            dense_mha_metadata_layer_name="model.layers.0.self_attn.attn",
            dcp_rank=op.dcp_rank,
            dcp_world_size=op.dcp_world_size,
            cp_kv_cache_interleave_size=op.cp_interleave,
            skip_topk_buffer_clear=True,
            topk_backend=op.topk_backend,
        )
