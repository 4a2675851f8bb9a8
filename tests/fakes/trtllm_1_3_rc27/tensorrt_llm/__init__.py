"""Stand-in for TensorRT-LLM 1.3 from about rc27: DSA has moved, and every top-k goes through TopK."""

from fake_base import OPS, define_ops

from .version import __version__

define_ops(*OPS)


def __getattr__(name):
    """The root package imports lazily."""
    if name == "LLM":
        from .llmapi import llm_args

        return llm_args.TorchLlmArgs
    raise AttributeError(name)


__all__ = ["__version__"]
