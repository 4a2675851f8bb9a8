"""Stand-in for TensorRT-LLM early 1.3 pre-releases: one module for DSA, queries with a scale."""

from fake_base import CUTE_DSL_SCHEMA, PREFILL_SCHEMA, define_ops

from .version import __version__

define_ops(
    "indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor(a!) indices, int next_n, "
    "int index_topk={topk}, Tensor? pre_idx=None, Tensor? heuristic_scratch=None, "
    "int compress_ratio=1, Tensor? radix_aux_indices=None, Tensor? radix_aux_logits=None) -> ()",
    PREFILL_SCHEMA,
    CUTE_DSL_SCHEMA,
)

__all__ = ["__version__"]
