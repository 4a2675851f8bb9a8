"""The compiled op of vLLM's prefill top-k in torch's registry, which outlives the modules of the fake."""

from __future__ import annotations

import torch

from gvr_topk.contract import exact_topk

_LIBRARY = torch.library.Library("_C", "FRAGMENT")

SCHEMA = (
    "(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int numRows, int stride0, "
    "int stride1, int topK) -> ()"
)
"""As vLLM 0.33 registers it."""


def _top_k_per_row_prefill(logits, starts, ends, indices, rows, stride0, stride1, k):
    """Positions from the start of each row's window, -1 padded, in no order that a test may rely on."""
    assert (stride0, stride1) == logits.stride()
    for row in range(rows):
        start, end = int(starts[row]), int(ends[row])
        window = logits[row : row + 1, start : max(start, end)]
        chosen = exact_topk(window, torch.tensor([window.shape[1]], device=window.device), k)
        indices[row] = chosen[0].flip(0)


for _name in ("top_k_per_row_prefill", "renamed_top_k_per_row_prefill"):
    # The second one is what a test takes for an op that has changed.
    _schema = SCHEMA if _name == "top_k_per_row_prefill" else SCHEMA.replace("rowStarts", "cu_seqlen_ks")
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _top_k_per_row_prefill, "CompositeExplicitAutograd")
