"""Stand-in for TensorRT-LLM 1.2: one module for DSA, a config without enable_heuristic_topk."""

import fake_base

from .version import __version__

DECODE = (
    "indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor(a!) indices, int next_n, "
    "int index_topk={topk}) -> ()"
)
OPS = (DECODE, fake_base.PREFILL_SCHEMA)
fake_base.define_ops(*OPS)

__all__ = ["__version__"]
