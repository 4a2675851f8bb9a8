"""Stand-in for TensorRT-LLM 1.2: one module for DSA, a config without enable_heuristic_topk."""

from fake_base import PREFILL_SCHEMA, define_ops

from .version import __version__

define_ops(
    "indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor(a!) indices, int next_n, "
    "int index_topk={topk}) -> ()",
    PREFILL_SCHEMA,
)

__all__ = ["__version__"]
