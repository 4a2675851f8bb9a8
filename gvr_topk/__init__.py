"""Exact, deterministic top-k for sparse attention (Guess-Verify-Refine).

`indexer_topk_decode` computes one decode step for one layer; `TopkState` carries a prediction from one step
to the next, and `bind` prepares a call that is made on the same tensors again; `RequestSlots` says which
request owns which slot of that state. `indexer_topk_prefill` selects in a window of every row of a prefill
chunk, and with a `PrefillCarry` in rows whose scores come in slices. `indexer_topk_blocks` selects positions
and blocks of positions in one call, and `indexer_topk_in_blocks` selects within given blocks. `topk` has the
signature of ``torch.topk``, and `kth_value`, `topk_threshold` and `topk_mask` describe the set that it
selects; `gvr_topk.torch_backend` serves ``torch.topk`` itself. `library_status` says whether CUDA tensors can
be served. `gvr_topk.integrations` connects the ops to serving engines.
"""

from __future__ import annotations

from gvr_topk.carry import PrefillCarry
from gvr_topk.library import library_status
from gvr_topk.ops import (
    bind,
    indexer_topk_blocks,
    indexer_topk_decode,
    indexer_topk_in_blocks,
    indexer_topk_prefill,
)
from gvr_topk.request_slots import RequestSlots
from gvr_topk.state import TopkState
from gvr_topk.torch_topk import kth_value, topk, topk_mask, topk_threshold

__all__ = [
    "PrefillCarry",
    "RequestSlots",
    "TopkState",
    "bind",
    "indexer_topk_blocks",
    "indexer_topk_decode",
    "indexer_topk_in_blocks",
    "indexer_topk_prefill",
    "kth_value",
    "library_status",
    "topk",
    "topk_mask",
    "topk_threshold",
]
__version__ = "0.3.0.dev0"
