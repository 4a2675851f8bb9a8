import torch

from tensorrt_llm._torch.attention_backend.trtllm import TrtllmAttentionMetadata


class DSAtrtllmAttentionMetadata(TrtllmAttentionMetadata):
    max_draft_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.num_sparse_topk = self.sparse_attention_config.index_topk
        self.compress_ratios = getattr(self.sparse_attention_config, "compress_ratios", [1])
        self._indexer_compress_ratio = next((r for r in (4, 1) if r in self.compress_ratios), 0)
        # TensorRT-LLM's own hints, by row of the batch.
        self.heuristic_prev_topk = torch.zeros(
            (self.kv_cache_manager.num_local_layers, self.max_num_requests, self.num_sparse_topk),
            dtype=torch.int32,
            device=self.device,
        )

    def prepare(self):
        super().prepare()

    def get_indexer_max_seq_len(self) -> int:
        return self.kv_cache_manager.max_seq_len // max(1, self._indexer_compress_ratio)
