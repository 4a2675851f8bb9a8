"""Rows of scores for GPU tests: those of requests, and kinds that are hard on a selection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")

SHAPES = {
    "small row": (8192, 2, 0),
    "resident, 32768": (32_768, 1, 0),
    "resident": (131_072, 1, 0),
    "resident x 2": (131_072, 2, 0),
    "262144": (262_144, 1, 0),
    "streaming, 262144": (262_144, 1, 4),
    "streaming": (1 << 20, 1, 0),
    "streaming x 64": (131_072, 64, 0),
    "one CTA": (131_072, 2, 1),
    "two CTAs": (131_072, 2, 2),
}
"""Width, rows and forced cluster size."""


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def draw(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def integers(low: int, high: int, count: int, seed: int) -> Tensor:
    """Integers of ``[low, high)``."""
    return torch.randint(low, high, (count,), generator=draw(seed), device="cuda", dtype=torch.int32)


def normal(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=draw(seed + width), device="cuda").to(dtype)


def rows_of_requests(rows: int, width: int, seed: int = 0, requests: int = 1, noise: float = 0.1) -> Tensor:
    """Neighbouring rows of a request are much alike, as the indexer's scores of neighbouring tokens are."""
    shape = (requests, width)
    base = torch.randn(shape, generator=draw(seed), device="cuda")
    own = torch.randn((rows, width), generator=draw(seed + 1), device="cuda")
    return base.repeat_interleave(-(-rows // requests), dim=0)[:rows] + noise * own


def _clustered(rows: int, width: int, k: int) -> Tensor:
    scores = rows_of_requests(rows, width)
    scores[:, width // 3 : width // 3 + k + k // 2] += 50
    return scores


def _ties_at_k(rows: int, width: int, k: int) -> Tensor:
    """About k scores above a plateau that straddles the k-th place, in any order."""
    rank = torch.rand(rows, width, generator=draw(k), device="cuda").argsort(dim=1)
    scores = rows_of_requests(rows, width).abs()
    above = torch.linspace(0, k + 1, rows, device="cuda").to(torch.int64)[:, None]
    return torch.where(rank < above, 1 + scores, torch.where(rank < above + 2 * k, 0.0, -1 - scores))


def _special(rows: int, width: int, k: int) -> Tensor:
    values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 6e4, -6e4], device="cuda")
    drawn = values[torch.randint(len(values), (rows, width), generator=draw(k), device="cuda")]
    chance = torch.rand(rows, width, generator=draw(k + 1), device="cuda")
    share = torch.linspace(0, 1, rows, device="cuda")[:, None] ** 3
    return torch.where(chance < share, drawn, rows_of_requests(rows, width))


def _by_turns(*values: float) -> Callable[[int, int, int], Tensor]:
    """Every row moved by another factor, so that what the row before says is far off."""

    def scores(rows: int, width: int, k: int) -> Tensor:
        factors = torch.tensor(values, device="cuda").repeat(-(-rows // len(values)))[:rows, None]
        return rows_of_requests(rows, width) * factors

    return scores


def _shifted(rows: int, width: int, k: int) -> Tensor:
    shift = torch.tensor([0.0, 1000.0, -1000.0, 3.0], device="cuda").repeat(-(-rows // 4))[:rows, None]
    return rows_of_requests(rows, width) + shift


def _two_values(rows: int, width: int, k: int) -> Tensor:
    share = torch.linspace(0, 1, rows, device="cuda")[:, None]
    return (torch.rand(rows, width, generator=draw(k), device="cuda") < share).float()


def _masked(rows: int, width: int, k: int) -> Tensor:
    share = torch.linspace(0, min(1.0, 3 * k / width), rows, device="cuda")[:, None]
    keep = torch.rand(rows, width, generator=draw(k), device="cuda") < share
    return torch.where(keep, rows_of_requests(rows, width), -INF)


def _any_kind_in_turn(rows: int, width: int, k: int) -> Tensor:
    """Rows of all other kinds, each of which follows one that says nothing about it."""
    kinds = [content(rows, width, k) for name, content in CONTENTS.items() if name != "any kind in turn"]
    return torch.stack([kinds[row % len(kinds)][row] for row in range(rows)])


def _constant(value: float) -> Callable[[int, int, int], Tensor]:
    return lambda rows, width, k: torch.full((rows, width), value, device="cuda")


CONTENTS: dict[str, Callable[[int, int, int], Tensor]] = {
    "normal": lambda rows, width, k: rows_of_requests(rows, width),
    "unrelated": lambda rows, width, k: torch.randn(rows, width, generator=draw(k), device="cuda"),
    "equal": _constant(1.5),
    "zeros": _constant(-0.0),
    "-inf": _constant(-INF),
    "inf": _constant(INF),
    "nan": _constant(NAN),
    "two values": _two_values,
    "few values": lambda rows, width, k: (2 * rows_of_requests(rows, width)).round(),
    "few positive": lambda rows, width, k: (rows_of_requests(rows, width, noise=1.0) - 3).relu(),
    "half positive": lambda rows, width, k: rows_of_requests(rows, width).relu(),
    "ascending": lambda rows, width, k: rows_of_requests(rows, width).sort(dim=1).values,
    "descending": lambda rows, width, k: rows_of_requests(rows, width).sort(dim=1).values.flip(1),
    "special": _special,
    "masked": _masked,
    "denormals": lambda rows, width, k: (20 * rows_of_requests(rows, width)).round() * 1e-45,
    "narrow": lambda rows, width, k: 128.6 + 0.01 * rows_of_requests(rows, width),
    "clustered": _clustered,
    "ties at k": _ties_at_k,
    "scaled by turns": _by_turns(1.0, 1e-4, 1e4, -1.0, 1e-2),
    "one of two requests": _by_turns(1.0, -50.0),
    "shifted by turns": _shifted,
    "any kind in turn": _any_kind_in_turn,
}
