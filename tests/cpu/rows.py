"""Rows of scores for tests of the ops and of a replay, and what a prefill of them has to give."""

from __future__ import annotations

import numpy as np
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


class DecodeRows:
    """Steps whose scores drift slowly, so that hints are worth something."""

    def __init__(self, n: int = 20_000, steps: int = 4, name: str = "rows") -> None:
        self.n, self.steps, self.name = n, steps, name
        generator = np.random.default_rng(0)
        self.base = generator.standard_normal(n + steps).astype(np.float32)
        self.noise = generator.standard_normal((steps, n + steps)).astype(np.float32)

    def length(self, step: int) -> int:
        return self.n + step

    def scores(self, step: int) -> np.ndarray:
        return (self.base + 0.3 * self.noise[step])[: self.length(step)]
