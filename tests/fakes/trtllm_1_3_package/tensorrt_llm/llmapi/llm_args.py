from typing import Literal, Optional, Union

from fake_base import (
    BaseSparseAttentionConfig,
    RocketSparseAttentionConfig,
    StrictBaseModel,
    update_llm_args_with_extra_dict,
)
from pydantic import Field

__all__ = ["TorchLlmArgs", "update_llm_args_with_extra_dict"]


class DeepSeekSparseAttentionConfig(BaseSparseAttentionConfig):
    algorithm: Literal["dsa"] = "dsa"
    index_n_heads: Optional[int] = None
    index_head_dim: Optional[int] = None
    index_topk: Optional[int] = None
    indexer_max_chunk_size: Optional[int] = None
    skip_indexer_for_short_seqs: bool = True
    use_cute_dsl_topk: bool = False
    enable_heuristic_topk: bool = Field(default=False, description="theirs")


class DeepSeekV4SparseAttentionConfig(DeepSeekSparseAttentionConfig):
    algorithm: Literal["deepseek_v4"] = "deepseek_v4"
    compress_ratios: list[int] = Field(default_factory=lambda: [1, 1, 4, 128, 4, 128, 4])


SparseAttentionConfig = Union[
    RocketSparseAttentionConfig,
    DeepSeekSparseAttentionConfig,
    DeepSeekV4SparseAttentionConfig,
]


class BaseLlmArgs(StrictBaseModel):
    model: str
    tensor_parallel_size: int = 1
    stop_token_ids: Optional[list[int]] = None
    sparse_attention_config: Optional[SparseAttentionConfig] = Field(default=None, discriminator="algorithm")


class TorchLlmArgs(BaseLlmArgs):
    max_batch_size: Optional[int] = None
