"""What `topk` and its kin have to give, by NumPy's lexsort, and rows that are hard to choose from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gvr_topk import kth_value, topk, topk_mask, topk_threshold

NAN, INF = float("nan"), float("inf")
ROWS = 3
BOTH = pytest.mark.parametrize("largest", [True, False])


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


def same(got: Tensor, wanted: Tensor) -> bool:
    """Whether values are equal, one NaN like another."""
    return got.dtype == wanted.dtype and torch.equal(got.nan_to_num(nan=7.25), wanted.nan_to_num(nan=7.25))


def check(given: Tensor, k: int, dim: int = -1, *, largest: bool = True) -> None:
    """Compare every result with the oracle: sorted and unsorted items, mask, k-th value and threshold."""
    unsorted = topk(given, k, dim, largest, sorted=False)
    got = topk(given, k, dim, largest)
    mask = topk_mask(given, k, dim, largest=largest)
    value, index = kth_value(given, k, dim, True, largest=largest)
    kth, quota = topk_threshold(given, k, dim, True, largest=largest)
    wanted = best(given, k, dim, largest=largest).to(given.device)
    assert torch.equal(got.indices, wanted)
    assert same(got.values, given.gather(dim, wanted))
    assert torch.equal(unsorted.indices, wanted.sort(dim).values)
    assert same(unsorted.values, given.gather(dim, unsorted.indices))
    assert torch.equal(mask, torch.zeros_like(given, dtype=torch.bool).scatter(dim, wanted, True))
    last = got.values.narrow(dim, k - 1, 1)
    assert torch.equal(index, wanted.narrow(dim, k - 1, 1)) and same(value, last) and same(kth, last)
    equal = (got.values == last) | (got.values.isnan() & last.isnan())
    assert torch.equal(quota, equal.sum(dim, keepdim=True))
    # PyTorch sorts a NaN whose sign is set, and others, to the wrong end of short rows.
    plain = given.masked_fill(given.isnan(), torch.nan) if given.is_floating_point() else given
    assert same(got.values, torch.topk(plain, k, dim, largest).values)


def check_all_elements(given: Tensor, k: int, *, largest: bool) -> None:
    """The same of the elements of all rows together, which have indices into the flattened input."""
    flat = given.reshape(-1)
    wanted = best(flat, k, largest=largest).to(given.device)
    mask = torch.zeros_like(flat, dtype=torch.bool).scatter(0, wanted, True).view(given.shape)
    assert torch.equal(topk_mask(given, k, None, largest=largest), mask)
    value, index = kth_value(given, k, None, largest=largest)
    assert index == wanted[-1] and value == flat[index] and value.shape == ()
    kth, quota = topk_threshold(given, k, None, largest=largest)
    above = (given > kth) if largest else (given < kth)
    assert kth == value and int(above.sum() + quota) == k


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


def _normal(*shape: int) -> Callable[[str], Tensor]:
    return lambda device: torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


SHAPES: dict[str, Callable[[str], Tensor]] = {
    "vector": _normal(30),
    "matrix": _normal(4, 30),
    "three dimensions": lambda device: _normal(3, 4, 10)(device).round(),
    "five dimensions": _normal(2, 3, 1, 4, 5),
    "transposed": lambda device: _normal(3, 4, 10)(device).transpose(0, 2),
    "every other": lambda device: _normal(4, 60)(device)[:, ::2],
    "expanded": lambda device: _normal(4, 1, 9)(device).expand(4, 3, 9),
    "part of a buffer": lambda device: _normal(4, 40)(device)[1:, 3:20],
    "integers": lambda device: (3 * _normal(4, 50)(device)).long(),
}
"""Tensors of any shape and layout on a device, by what they are."""
