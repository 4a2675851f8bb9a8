import torch

from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer, sparse_attn_indexer


class DeepseekV32Attention(torch.nn.Module):
    def __init__(self, *indexer):
        super().__init__()
        self.indexer_op = SparseAttnIndexer(*indexer)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return sparse_attn_indexer(*self.indexer_op.arguments(hidden_states, str))
