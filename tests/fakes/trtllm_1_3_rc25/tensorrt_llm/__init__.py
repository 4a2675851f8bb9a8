"""Stand-in for TensorRT-LLM 1.3 from about rc25: use_custom_topk is gone."""

from fake_base import CUTE_DSL_SCHEMA, DECODE_SCHEMA, PREFILL_SCHEMA, define_ops

from .version import __version__

define_ops(DECODE_SCHEMA, PREFILL_SCHEMA, CUTE_DSL_SCHEMA)

__all__ = ["__version__"]
