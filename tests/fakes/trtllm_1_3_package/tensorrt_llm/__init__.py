"""Stand-in for TensorRT-LLM 1.3: DSA is a package, the config knows enable_heuristic_topk."""

from fake_base import OPS, define_ops

from .version import __version__

define_ops(*OPS)

__all__ = ["__version__"]
