"""Stand-in for TensorRT-LLM early 1.3 pre-releases: one module for DSA, queries with a scale."""

from fake_base import CUTE_DSL_SCHEMA, DECODE_SCHEMA, PREFILL_SCHEMA, define_ops

from .version import __version__

define_ops(DECODE_SCHEMA, PREFILL_SCHEMA, CUTE_DSL_SCHEMA)

__all__ = ["__version__"]
