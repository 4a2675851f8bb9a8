from typing import Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BaseSparseAttentionConfig(StrictBaseModel):
    algorithm: str
    seq_len_threshold: Optional[int] = None


class RocketSparseAttentionConfig(BaseSparseAttentionConfig):
    algorithm: Literal["rocket"] = "rocket"


class DeepSeekSparseAttentionConfig(BaseSparseAttentionConfig):
    algorithm: Literal["dsa"] = "dsa"
    index_n_heads: Optional[int] = None
    index_head_dim: Optional[int] = None
    index_topk: Optional[int] = None
    indexer_max_chunk_size: Optional[int] = None
    skip_indexer_for_short_seqs: bool = True
    enable_heuristic_topk: bool = Field(default=False, description="theirs")


SparseAttentionConfig = Union[RocketSparseAttentionConfig, DeepSeekSparseAttentionConfig]


class BaseLlmArgs(StrictBaseModel):
    model: str
    tensor_parallel_size: int = 1
    sparse_attention_config: Optional[SparseAttentionConfig] = Field(default=None, discriminator="algorithm")


class TorchLlmArgs(BaseLlmArgs):
    max_batch_size: Optional[int] = None


def update_llm_args_with_extra_dict(llm_args: dict, llm_args_dict: dict) -> dict:
    return {**llm_args, **llm_args_dict}


class DeepSeekV4SparseAttentionConfig(DeepSeekSparseAttentionConfig):
    algorithm: Literal["deepseek_v4"] = "deepseek_v4"
