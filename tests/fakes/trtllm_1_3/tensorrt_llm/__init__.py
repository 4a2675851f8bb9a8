"""Stand-in for the 1.3 pre-releases: DSA is a package, the config knows enable_heuristic_topk."""

from fake_base import define_ops

from .version import __version__

define_ops(
    "indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor(a!) indices, int next_n, "
    "int index_topk={topk}, Tensor? pre_idx=None, Tensor? heuristic_scratch=None, "
    "int compress_ratio=1, Tensor? radix_aux_indices=None, Tensor? radix_aux_logits=None) -> ()",
    "indexer_topk_prefill(Tensor logits, Tensor row_starts, Tensor row_ends, Tensor(a!) indices, "
    "int index_topk={topk}) -> ()",
)

__all__ = ["__version__"]
