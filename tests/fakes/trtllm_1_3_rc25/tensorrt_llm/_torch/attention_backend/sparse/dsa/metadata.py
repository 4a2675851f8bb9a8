import torch

from tensorrt_llm._torch.attention_backend.trtllm import TrtllmAttentionMetadata


class DSAtrtllmAttentionMetadata(TrtllmAttentionMetadata):
    max_draft_tokens: int = 0
    in_mtp_draft_loop: bool = False
    indexer_skip_topk: bool = False
    mtp_num_accepted = None
    shared_topk_indices = None

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

    def set_mtp_num_accepted(self, num_accepted):
        self.mtp_num_accepted = num_accepted

    def set_in_mtp_draft_loop(self, active):
        self.in_mtp_draft_loop = active

    def set_skip_topk(self, skip):
        self.indexer_skip_topk = skip
