"""Exact, deterministic top-k for sparse-attention decode (Guess-Verify-Refine).

`indexer_topk_decode` computes one step for one layer; `PriorState` keeps the previous step's result
by request; `library_status` says whether CUDA tensors can be served. `gvr_topk.integrations` connects
them to serving engines.
"""

from __future__ import annotations

from gvr_topk.library import library_status
from gvr_topk.ops import indexer_topk_decode, new_guess_state
from gvr_topk.prior import PriorState

__all__ = ["PriorState", "indexer_topk_decode", "library_status", "new_guess_state"]
__version__ = "0.1.0"
