"""Rows of scores for tests of the ops, and what a prefill of them has to give."""

from __future__ import annotations

import torch
from torch import Tensor

from gvr_topk.evaluation.oracle import sorted_row

ROWS, WIDTH = 6, 64


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scores(rows: int = ROWS, width: int = WIDTH, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with many ties, at the k-th place too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, (rows, width), generator=generator).to(dtype)


def in_windows(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> list[list[int]]:
    """Positions of each row by a sort in NumPy of what a slice in Python gives."""
    rows = []
    for row, start, end in zip(logits.float().numpy(), starts.tolist(), ends.tolist(), strict=True):
        chosen = sorted_row(row[max(start, 0) : max(min(end, len(row)), 0)], k).tolist()
        rows.append(chosen + [-1] * (k - len(chosen)))
    return rows
