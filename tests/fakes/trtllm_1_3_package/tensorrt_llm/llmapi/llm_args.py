from typing import Optional, Union

from fake_base import (
    DsaConfig,
    LlmArgs,
    RocketSparseAttentionConfig,
    V4Config,
    update_llm_args_with_extra_dict,
)
from pydantic import Field

__all__ = ["TorchLlmArgs", "update_llm_args_with_extra_dict"]


class DeepSeekSparseAttentionConfig(DsaConfig):
    enable_heuristic_topk: bool = Field(default=False, description="theirs")


class DeepSeekV4SparseAttentionConfig(V4Config, DeepSeekSparseAttentionConfig):
    pass


SparseAttentionConfig = Union[
    RocketSparseAttentionConfig, DeepSeekSparseAttentionConfig, DeepSeekV4SparseAttentionConfig
]


class BaseLlmArgs(LlmArgs):
    sparse_attention_config: Optional[SparseAttentionConfig] = Field(default=None, discriminator="algorithm")


class TorchLlmArgs(BaseLlmArgs):
    max_batch_size: Optional[int] = None
