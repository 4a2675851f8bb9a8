"""Stand-in for TensorRT-LLM 1.3 from about rc27: DSA has moved, and every top-k goes through TopK."""

from fake_base import CUTE_DSL_SCHEMA, PREFILL_SCHEMA, define_ops

from .version import __version__

define_ops(
    "indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor(a!) indices, int next_n, "
    "int index_topk={topk}, Tensor? pre_idx=None, Tensor? heuristic_scratch=None, "
    "int compress_ratio=1, Tensor? radix_aux_indices=None, Tensor? radix_aux_logits=None) -> ()",
    PREFILL_SCHEMA,
    CUTE_DSL_SCHEMA,
)


def __getattr__(name):
    """The root package imports lazily."""
    if name == "LLM":
        from .llmapi import llm_args

        return llm_args.TorchLlmArgs
    raise AttributeError(name)


__all__ = ["__version__"]
