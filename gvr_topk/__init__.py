"""Exact, deterministic top-k for sparse-attention decode (Guess-Verify-Refine).

`indexer_topk_decode` computes one step for one layer; `TopkState` carries a prediction from one step to the
next; `RequestSlots` says which request owns which slot of it; `library_status` says whether CUDA tensors can
be served. `gvr_topk.integrations` connects them to serving engines.
"""

from __future__ import annotations

from gvr_topk.library import library_status
from gvr_topk.ops import indexer_topk_decode
from gvr_topk.request_slots import RequestSlots
from gvr_topk.state import TopkState

__all__ = ["RequestSlots", "TopkState", "indexer_topk_decode", "library_status"]
__version__ = "0.1.0"
