"""What every GPU test compares with: the contract's oracle, run after the kernel, on poisoned memory."""

from __future__ import annotations

import torch
from torch import Tensor

import gvr_topk
from gvr_topk.contract import STATE_FLOATS, exact_topk, row_lengths

POISON = -7777


def place(rows: Tensor, *, pad: int = 0, shift: int = 0) -> Tensor:
    """Copy rows into a wider buffer: `pad` NaN columns behind them, `shift` elements off alignment."""
    count, width = rows.shape
    buffer = torch.full((count * (width + pad) + shift + 8,), float("nan"), dtype=rows.dtype, device="cuda")
    view = buffer[shift : shift + count * (width + pad)].view(count, width + pad)
    view[:, :width] = rows.to("cuda")
    return view[:, :width]


def run(logits: Tensor, lengths: Tensor, k: int, **arguments: object) -> Tensor:
    """Call the op on a poisoned output with guard columns, and check that the guards survive."""
    out = torch.full((logits.shape[0], k + 3), POISON, dtype=torch.int32, device="cuda")
    gvr_topk.indexer_topk_decode(logits, lengths, k, out=out, **arguments)  # type: ignore[arg-type]
    assert bool((out[:, k:] == POISON).all()), "wrote past column k"
    return out[:, :k]


def wrong_rows(got: Tensor, logits: Tensor, lengths: Tensor, k: int, next_n: int = 1) -> list[int]:
    """Rows whose result is not bit for bit the contract's."""
    visible = row_lengths(lengths, logits.shape[0], next_n).clamp(max=logits.shape[1])
    want = exact_topk(logits, visible, k)
    return torch.nonzero((got != want).any(dim=1)).flatten().tolist()


def state(
    slots: int, place: float | Tensor = -1.0, *, value: float = 0.0, limit: float = 0.0, spreads: float = 0.0
) -> Tensor:
    """A `guess_state` whose slots hold these numbers; the first, which says of what kind, may differ."""
    made = torch.empty(slots, STATE_FLOATS, device="cuda")
    for column, number in enumerate((place, value, limit, spreads)):
        made[:, column] = number
    return made


def full_lengths(logits: Tensor) -> Tensor:
    """Every row visible to its end."""
    return torch.full((logits.shape[0],), logits.shape[1], dtype=torch.int32, device="cuda")
