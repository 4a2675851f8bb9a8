"""What the score rows of random calls hold, kind by kind."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from eval.fuzz.draw import Draw


def _normal(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return draw.normal(rows, n)


def _relu(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """A share of positive scores around ``k / n``, above a plateau of zeros."""
    shift = draw.normal(rows, 1) - 1.5
    return (_normal(rows, n, k, draw, dtype) + shift).relu()


def _narrow(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return 128.6 + 0.1 * draw.uniform(rows, n)


def _constant(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    values = torch.tensor([0.0, -0.0, 1.5, np.nan, np.inf, -np.inf, -6e4])
    return draw.chosen(values, rows, 1).expand(rows, n)


def _few_values(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return draw.integers(-3, 4, rows, n).float()


def _ties_at_k(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """About k values above a plateau that straddles the k-th place, in any order."""
    above = draw.integers(0, min(n, k) + 1)
    equal = draw.integers(0, min(n, 8 * k) + 1)
    rank = draw.uniform(rows, n).argsort(dim=1)
    values = draw.normal(rows, n).abs()
    return torch.where(rank < above, 1 + values, torch.where(rank < above + equal, 0.0, -1 - values))


def _bits(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """Any bit pattern: every NaN, infinity, denormal and exponent."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    drawn = draw.integers(limits.min, limits.max + 1, rows, n)
    return drawn.to(integer).view(dtype)


def _ulps(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """A crowd within ten units in the last place, among ordinary values."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    one = torch.ones((), dtype=dtype, device=draw.device).view(integer)
    near = (one + draw.integers(0, 10, rows, n)).to(integer).view(dtype)
    ordinary = draw.normal(rows, n).to(dtype)
    crowd = draw.uniform(rows, n) < 0.7
    return torch.where(crowd, near, ordinary)


def _denormals(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    smallest = {torch.float32: 1e-45, torch.bfloat16: 1e-40, torch.float16: 6e-8}[dtype]
    drawn = draw.integers(-50, 51, rows, n)
    return (drawn.double() * smallest).to(dtype)


def _masked(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """Mostly -inf, with fewer or more than k ordinary values left."""
    share = draw.uniform(rows, 1) * min(1.0, 2 * k / n)
    keep = draw.uniform(rows, n) < share
    return torch.where(keep, _normal(rows, n, k, draw, dtype), float("-inf"))


def _special(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    values = torch.tensor([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4, -6e4])
    drawn = draw.chosen(values, rows, n)
    share = draw.uniform(rows, 1) ** 4
    replaced = draw.uniform(rows, n) < share
    return torch.where(replaced, drawn, _normal(rows, n, k, draw, dtype))


def _ascending(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return _normal(rows, n, k, draw, dtype).sort(dim=1).values


def _descending(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return _ascending(rows, n, k, draw, dtype).flip(1)


def _one_chunk(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """The whole result in neighbouring positions: one thread, warp or CTA holds it."""
    scores = _normal(rows, n, k, draw, dtype)
    start = int(draw.integers(0, max(1, n - k)))
    scores[:, start : start + k] += 50
    return scores


def _outlier(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """Tiny values beside one that stretches the range."""
    scores = _normal(rows, n, k, draw, dtype) * (1e-30 if dtype != torch.float16 else 1e-4)
    scores[:, int(draw.integers(0, n))] = 3e38 if dtype != torch.float16 else 6e4
    return scores


CONTENTS: dict[str, Callable[[int, int, int, Draw, torch.dtype], Tensor]] = {
    kind.__name__.removeprefix("_"): kind
    for kind in (
        *(_normal, _relu, _narrow, _constant, _few_values, _ties_at_k, _bits, _ulps, _denormals),
        *(_masked, _special, _ascending, _descending, _one_chunk, _outlier),
    )
}
"""Kinds of rows: ``(rows, width, k, generator, dtype) -> [rows, width]``, cast to the dtype by the caller."""
