"""What `topk` has to choose, by NumPy's lexsort, and rows that are hard to choose from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
ROWS = 3


def best(given: Tensor, k: int, dim: int = -1, *, largest: bool = True) -> Tensor:
    """Indices of the `k` best elements along a dimension, the best first.

    Of equal ones the smallest indices are chosen, and stand first. NaN is above every number: first among the
    largest, last among the smallest.
    """
    plain = given.detach().cpu()
    exact = plain.to(torch.float64 if plain.is_floating_point() else torch.int64).numpy()

    def of_row(row: np.ndarray) -> np.ndarray:
        is_nan = np.isnan(row)
        # ~x orders integers as -x does, and does not overflow.
        values = (-row if row.dtype.kind == "f" else ~row) if largest else row
        # lexsort reads its keys from the last.
        keys = (np.arange(len(row)), np.where(is_nan, 0, values), ~is_nan if largest else is_nan)
        return np.lexsort(keys)[:k]

    rows = np.moveaxis(exact, dim, -1)
    chosen = [of_row(row) for row in rows.reshape(-1, rows.shape[-1])]
    indices = np.array(chosen, dtype=np.int64).reshape(*rows.shape[:-1], k)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(indices, -1, dim)))


def _special(rng: np.random.Generator, width: int) -> np.ndarray:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    largest = np.finfo(np.float32).max
    rest = [INF, -INF, 0.0, -0.0, 1.0, -1.0, largest, -largest, 1e-45, -1e-45]
    return rng.choice(np.concatenate((nans, np.array(rest, dtype=np.float32))), (ROWS, width))


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, width: rng.standard_normal((ROWS, width)),
    "few values": lambda rng, width: rng.integers(-2, 3, (ROWS, width)),
    "equal": lambda rng, width: np.full((ROWS, width), 1.5),
    "zeros of both signs": lambda rng, width: rng.choice([0.0, -0.0], (ROWS, width)),
    "special": _special,
    "NaN alone": lambda rng, width: np.full((ROWS, width), NAN),
    "infinite and NaN": lambda rng, width: rng.choice([INF, NAN, -INF], (ROWS, width)),
    "denormal": lambda rng, width: rng.integers(-5, 6, (ROWS, width)) * 1e-45,
}


def rows_of(kind: str, width: int, seed: int = 0) -> Tensor:
    """Rows of one kind, ``[3, width]``, float32."""
    return torch.from_numpy(KINDS[kind](np.random.default_rng(seed), width).astype(np.float32))
