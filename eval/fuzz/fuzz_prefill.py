"""Random calls of the prefill op: windows, contents, requests, tables and layouts.

As in `eval.fuzz.fuzz_cases`, a case is a few plain values drawn from ``(seed, index)``, and its tensors are
drawn from the same pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.fuzz.fuzz_cases import DTYPES, TUNED_K, Oracle, strided
from eval.fuzz.fuzz_contents import CONTENTS, Choices, Draw, draw_integer
from gvr_topk.arguments import PREFILL_PATHS
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.contract import exact_topk
from gvr_topk.evaluation.oracle import translate_positions

PATHS = tuple(path.name.lower() for path in PREFILL_PATHS)
WINDOWS = ("full", "causal", "random", "near_k", "tiny", "beyond", "inverted", "any_int32")
FRESH = (0.0, 0.01, 0.3, 1.0)
POISONS = ("none", "nan", "inf")

INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True)
class PrefillCase:
    """One call of the prefill op, before its tensors.

    Attributes
    ----------
    seed, index : int
        What the case was drawn from.
    rows, width, k : int
    dtype : str
        A key of `eval.fuzz.fuzz_cases.DTYPES`.
    contents : tuple of str
        Kinds of row (`CONTENTS`).
    windows : tuple of str
        Kinds of window (`WINDOWS`).
    by_turns : bool
        Kinds of row and window take turns from row to row, instead of one behind the other.
    fresh : float
        Share of its scores in which a row differs from the others of its kind of content.
    poison : str
        What lies outside of the windows: ``none`` (other scores), ``nan`` or ``inf``.
    pad, shift : int
        Elements between rows, and by which the first row misses its alignment.
    requests : int
        0: no row_request, so that tables have a row for each row.
    offsets : bool
    page_size : int
        0: no page table.
    holes : bool
        A part of the pages is not there.
    cache_slots : bool
        The cache slots go beside the positions instead of in their place.
    counts, stats : bool
    path, pdl, streams
        Passed on.
    """

    seed: int
    index: int
    rows: int
    width: int
    k: int
    dtype: str
    contents: tuple[str, ...]
    windows: tuple[str, ...]
    by_turns: bool
    fresh: float
    poison: str
    pad: int
    shift: int
    requests: int
    offsets: bool
    page_size: int
    holes: bool
    cache_slots: bool
    counts: bool
    stats: bool
    path: str
    pdl: bool
    streams: bool

    def as_json(self) -> dict[str, Any]:
        return {"op": "prefill", **asdict(self)}

    def optional(self) -> dict[str, bool]:
        """Optional arguments of the op, and whether the call has them."""
        return {
            "row_request": self.requests > 0,
            "offsets": self.offsets,
            "counts": self.counts,
            "page_table": self.page_size > 0,
            "slots": self.cache_slots,
            "stats": self.stats,
            "pdl": self.pdl,
            "streams": self.streams,
        }

    @property
    def table_rows(self) -> int:
        """Rows of the page table, and numbers of the offsets."""
        return self.requests or self.rows


def draw_prefill_case(seed: int, index: int, *, elements: int, paths: Sequence[str] = PATHS) -> PrefillCase:
    """Draw a case of at most about `elements` scores; same arguments, same case."""
    choices = Choices(seed, index)
    rng, pick, some = choices.rng, choices.pick, choices.some
    longest = min(elements, MAX_WIDTH if rng.random() < 0.05 else 1 << 16)
    k = int(pick(*TUNED_K)) if rng.random() < 0.5 else int(2 ** rng.uniform(0, 12.5))
    shortest = min(2 * k, longest) if rng.random() < 0.8 else 1
    width = max(1, int(2 ** rng.uniform(np.log2(shortest), np.log2(longest))))
    most = max(1, min(elements // max(width, k), 700))
    # Rows are predicted where there are more of them than CTAs.
    rows = most if rng.random() < 0.4 else int(2 ** rng.uniform(0, np.log2(most)))
    has_offsets = bool(rng.random() < 0.4)
    page_size = int(pick(1, 16, 64, 1000)) if rng.random() < 0.3 else 0
    has_table = has_offsets or page_size > 0
    return PrefillCase(
        seed=seed,
        index=index,
        rows=rows,
        width=width,
        k=k,
        dtype=str(pick(*DTYPES)),
        contents=some(tuple(CONTENTS), 3),
        windows=some(WINDOWS, 3) if rng.random() < 0.6 else (str(pick("full", "causal")),),
        by_turns=bool(rng.random() < 0.4),
        fresh=float(pick(*FRESH)),
        poison=str(pick(*POISONS)),
        pad=int(pick(0, 1, 3, 8, 64)),
        shift=int(pick(0, 0, 1, 2, 3, 5)),
        requests=int(rng.integers(1, rows + 4)) if has_table and rng.random() < 0.6 else 0,
        offsets=has_offsets,
        page_size=page_size,
        holes=bool(rng.random() < 0.5),
        cache_slots=bool(page_size and (has_offsets or rng.random() < 0.5)),
        counts=bool(rng.random() < 0.5),
        stats=bool(rng.random() < 0.5),
        path=str(pick(*paths)),
        pdl=bool(rng.random() < 0.3),
        streams=bool(rng.random() < 0.3),
    )


@dataclass
class PrefillProblem:
    """Tensors of a case, and what the op has to write."""

    logits: Tensor  # [rows, width], with NaN between the rows
    row_starts: Tensor  # [rows] int32
    row_ends: Tensor  # [rows] int32
    row_request: Tensor | None  # [rows] int32
    offsets: Tensor | None  # [table_rows] int32
    page_table: Tensor | None  # [table_rows, pages] int32
    lengths: Tensor  # [rows] int64: of the windows, 0 for rows of no request
    out: Tensor  # [rows, k] int32: wanted
    slots: Tensor | None  # [rows, k] int32: wanted


def make_prefill_problem(case: PrefillCase, device: str, oracle: Oracle = exact_topk) -> PrefillProblem:
    """Tensors of a case on a device, and the answer that `oracle` gives."""
    draw = torch.Generator(device=device).manual_seed(case.seed * 1_000_003 + case.index)
    logits = strided(case.rows, case.width, case.pad, case.shift, DTYPES[case.dtype], device)
    for kind, rows in _parts(case, case.contents):
        logits[rows] = _alike(kind, len(range(case.rows)[rows]), case, draw)
    row_starts, row_ends = torch.zeros(2, case.rows, dtype=torch.int32, device=device)
    for kind, rows in _parts(case, case.windows):
        row_starts[rows], row_ends[rows] = _windows(kind, len(range(case.rows)[rows]), case, draw)
    starts = row_starts.to(torch.int64).clamp(min=0)
    lengths = (row_ends.to(torch.int64).clamp(max=case.width) - starts).clamp(min=0)
    if case.poison != "none":
        position = torch.arange(case.width, device=device)
        outside = (position < starts[:, None]) | (position >= (starts + lengths)[:, None])
        logits.masked_fill_(outside, float(case.poison))
    request, row_request = torch.arange(case.rows, device=device), None
    if case.requests:
        row_request = torch.randint(
            -1, case.requests + 1, (case.rows,), generator=draw, device=device, dtype=torch.int32
        )
        request = row_request.to(torch.int64)
        lengths = torch.where((request >= 0) & (request < case.requests), lengths, 0)
    # Windows are moved to the first column, where the oracles of decode take them.
    columns = (starts[:, None] + torch.arange(case.width, device=device)).clamp(max=case.width - 1)
    positions = oracle(logits.gather(1, columns), lengths, case.k)
    out, slots, offsets = positions, None, None
    page_table = _page_table(case, draw)
    if page_table is not None:
        slots = translate_positions(positions, page_table, case.page_size, request)
        out = positions if case.cache_slots else slots
    if case.offsets:
        offsets = _offsets(case, draw)
        moved = positions.to(torch.int64) + offsets[request.clamp(0, case.table_rows - 1), None]
        held = (positions >= 0) & (moved >= INT32.min) & (moved <= INT32.max)
        out = torch.where(held, moved, -1).to(torch.int32)
    return PrefillProblem(
        logits,
        row_starts,
        row_ends,
        row_request,
        offsets,
        page_table,
        lengths,
        out,
        slots if case.cache_slots else None,
    )


def _parts(case: PrefillCase, kinds: tuple[str, ...]) -> list[tuple[str, slice]]:
    """Rows of each kind: in turn, or one kind behind the other."""
    count = len(kinds)
    if case.by_turns:
        return [(kind, slice(turn, None, count)) for turn, kind in enumerate(kinds) if turn < case.rows]
    bounds = [case.rows * turn // count for turn in range(count + 1)]
    return [
        (kind, slice(bounds[i], bounds[i + 1])) for i, kind in enumerate(kinds) if bounds[i] < bounds[i + 1]
    ]


def _alike(kind: str, rows: int, case: PrefillCase, draw: Draw) -> Tensor:
    """Rows of a content, each of which has only a share of its scores to itself."""
    dtype = DTYPES[case.dtype]
    scores = CONTENTS[kind](rows, case.width, case.k, draw, dtype).to(dtype)
    own = torch.rand(rows, case.width, generator=draw, device=draw.device) < case.fresh
    return torch.where(own, scores, scores[:1])


def _windows(kind: str, rows: int, case: PrefillCase, draw: Draw) -> tuple[Tensor, Tensor]:
    """First columns, and those past the last."""
    width, k = case.width, case.k

    def integers(low: int, high: int) -> Tensor:
        """Integers of ``[low, high)``, one a row."""
        return torch.randint(low, max(high, low + 1), (rows,), generator=draw, device=draw.device)

    if kind == "full":
        return integers(0, 1), integers(width, width + 1)
    if kind == "causal":
        first = draw_integer(0, max(1, min(width // 2, width - k)), draw).expand(rows)
        return first, width - rows + 1 + torch.arange(rows, device=draw.device)
    if kind == "near_k":
        first = integers(0, width - k)
        return first, first + integers(k - 2, k + 4)
    if kind == "tiny":
        first = integers(-3, width + 3)
        return first, first + integers(-3, 5)
    if kind == "beyond":
        return integers(-3000, 20), integers(width, width + 3000)
    if kind == "any_int32":
        return integers(INT32.min, INT32.max + 1), integers(INT32.min, INT32.max + 1)
    ends = torch.stack([integers(0, width + 1), integers(0, width + 1)])
    lower, upper = ends.amin(dim=0), ends.amax(dim=0)
    return (upper, lower) if kind == "inverted" else (lower, upper)


def _offsets(case: PrefillCase, draw: Draw) -> Tensor:
    """Usual offsets, and now and then any number of 32 bits, or one that overflows within the window."""
    shape = (case.table_rows,)
    usual = torch.randint(0, 1 << 22, shape, generator=draw, device=draw.device)
    wild = torch.randint(INT32.min, INT32.max + 1, shape, generator=draw, device=draw.device)
    near = INT32.max - torch.randint(0, case.width + 2, shape, generator=draw, device=draw.device)
    chance = torch.rand(shape, generator=draw, device=draw.device)
    return torch.where(chance < 0.7, usual, torch.where(chance < 0.85, wild, near)).to(torch.int32)


def _page_table(case: PrefillCase, draw: Draw) -> Tensor | None:
    if not case.page_size:
        return None
    pages = int(draw_integer(0, min(2 * (case.width // case.page_size) + 3, 4096), draw))
    shape = (case.table_rows, pages)
    largest = INT32.max // case.page_size + 2
    table = torch.randint(0, min(largest, INT32.max), shape, generator=draw, device=draw.device)
    if case.holes:
        table = torch.where(torch.rand(shape, generator=draw, device=draw.device) < 0.3, -1 - table, table)
    return table.to(torch.int32)
