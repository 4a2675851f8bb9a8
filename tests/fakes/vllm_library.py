"""The compiled op of vLLM's prefill top-k in torch's registry, which outlives the modules of the fake."""

from __future__ import annotations

import torch
from stable_topk import chosen

_LIBRARY = torch.library.Library("_C", "FRAGMENT")

SCHEMA = (
    "(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int numRows, int stride0, "
    "int stride1, int topK) -> ()"
)
"""As vLLM 0.33 registers it."""


def _top_k_per_row_prefill(logits, starts, ends, indices, rows, stride0, stride1, k):
    """Positions from the start of each row's window, -1 padded, in no order that a test may rely on."""
    assert (stride0, stride1) == logits.stride()
    lengths = ends[:rows] - starts[:rows]
    indices[:rows] = chosen(logits[:rows], lengths, k, starts)


for _name in ("top_k_per_row_prefill", "renamed_top_k_per_row_prefill"):
    # The second one is what a test takes for an op that has changed.
    _schema = SCHEMA if _name == "top_k_per_row_prefill" else SCHEMA.replace("rowStarts", "cu_seqlen_ks")
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _top_k_per_row_prefill, "CompositeExplicitAutograd")
