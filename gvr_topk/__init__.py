"""Exact, deterministic top-k for sparse attention (Guess-Verify-Refine).

`indexer_topk_decode` computes one decode step for one layer; `TopkState` carries a prediction from one step
to the next; `RequestSlots` says which request owns which slot of that state. `indexer_topk_prefill` selects
in a window of every row of a prefill chunk, and with a `PrefillCarry` in rows whose scores come in slices.
`indexer_topk_blocks` selects positions and blocks of positions in one call, and `indexer_topk_in_blocks`
selects within given blocks. `library_status` says whether CUDA tensors can be served. `gvr_topk.integrations`
connects the ops to serving engines.
"""

from __future__ import annotations

from gvr_topk.carry import PrefillCarry
from gvr_topk.library import library_status
from gvr_topk.ops import (
    indexer_topk_blocks,
    indexer_topk_decode,
    indexer_topk_in_blocks,
    indexer_topk_prefill,
)
from gvr_topk.request_slots import RequestSlots
from gvr_topk.state import TopkState

__all__ = [
    "PrefillCarry",
    "RequestSlots",
    "TopkState",
    "indexer_topk_blocks",
    "indexer_topk_decode",
    "indexer_topk_in_blocks",
    "indexer_topk_prefill",
    "library_status",
]
__version__ = "0.2.0"
