"""Exact, deterministic top-k for sparse attention, as a kernel of Hugging Face's `kernels` library.

`indexer_topk` and the layer `layers.IndexerTopk` take the place of ``torch.topk``, and the layer
`layers.IndexerTopkPrefill` selects in a window of every row. `indexer_topk_decode` and `indexer_topk_prefill`
are the whole ops. Their names in ``torch.ops`` are in the compiled library and the same for every version, so
one process has one copy of them: where the installed package is imported already, these are its functions.
"""

from __future__ import annotations

import sys
from pathlib import Path

_imported = sys.modules.get("gvr_topk.ops")
if _imported is not None:
    __path__ = [str(Path(str(_imported.__file__)).parent)]
    # This module has taken the other's place in sys.modules; submodules are attributes of their package.
    globals().update(
        {
            name.partition(".")[2]: module
            for name, module in list(sys.modules.items())
            if name.startswith("gvr_topk.") and name.count(".") == 1
        }
    )

from gvr_topk import layers
from gvr_topk.layers import indexer_topk
from gvr_topk.library import library_status
from gvr_topk.ops import indexer_topk_decode, indexer_topk_prefill
from gvr_topk.request_slots import RequestSlots
from gvr_topk.state import TopkState

__all__ = [
    "RequestSlots",
    "TopkState",
    "indexer_topk",
    "indexer_topk_decode",
    "indexer_topk_prefill",
    "layers",
    "library_status",
]
