"""Random calls of the op: shapes, layouts, contents, hints and everything else that an engine may pass.

A case is a few plain values drawn from ``(seed, index)``; its tensors are drawn from the same pair, so a
case can be made again from two numbers on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.fuzz.fuzz_contents import CONTENTS, Choices, Draw, draw_integer
from gvr_topk.constants import (
    MAX_WIDTH,
    STATE_FLOATS,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
)
from gvr_topk.contract import exact_topk, order_key, row_lengths
from gvr_topk.evaluation.oracle import drop_masked_positions, translate_positions
from gvr_topk.policy import plan
from gvr_topk.state import TopkState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PATHS = ("auto", "no_hint", "radix_rounds", "paper_gvr")
TUNED_K = (512, 1024, 2048)
POISON = -7777
GUARD_COLUMNS = 3

LENGTHS = ("full", "random", "near_k", "tiny", "beyond")
HINTS = ("true", "half", "random", "any_int32", "minus_one", "zero", "one_position", "past_the_end")
STATES = (
    *("unknown", "share", "zscore", "value", "either", "absurd", "infinite", "masked", "window"),
    *("zero", "one", "nan", "inf", "huge", "bits"),
)
ABSENT = "absent"

Oracle = Callable[..., Tensor]
"""``(logits, lengths, k)``, or with blocks before `k`, ``-> positions`` on the device of the logits."""


def on_cpu(oracle: Oracle) -> Oracle:
    """An oracle that NumPy computes, for tensors of any device."""

    def moved(logits: Tensor, *rest: Tensor | int) -> Tensor:
        others = [part.cpu() if isinstance(part, Tensor) else part for part in rest]
        return oracle(logits.cpu(), *others).to(logits.device)

    return moved


@dataclass(frozen=True)
class Case:
    """One call of the op, before its tensors.

    Attributes
    ----------
    seed, index : int
        What the case was drawn from.
    requests, next_n, width, k : int
        Shape: ``requests * next_n`` rows.
    dtype : str
        A key of `DTYPES`.
    contents : tuple of str
        Kinds of row (`CONTENTS`), taken in turn.
    lengths : tuple of str
        Kinds of sequence length (`LENGTHS`), taken in turn by the requests, or by the rows.
    by_row : bool
        A length for each row, which differ within a request, instead of one for each request.
    pad, shift : int
        Elements between rows, and by which the first row misses its alignment.
    state : str
        Content of the state's words (`STATES`), or ``absent``.
    hints : tuple of str
        Kinds of previous choice (`HINTS`), taken in turn by the slots; empty: the state keeps no indices.
    slots : str
        ``own`` (no row_slot), ``shuffled`` (one per request, some without), ``any`` (rows of a request
        differ).
    indices_pad, offset : int
        Elements between slots of the indices, and the hint offset.
    counts, stats : bool
    page_size : int
        0: no page table.
    holes : bool
        A part of the pages is not there.
    cache_slots : bool
        The cache slots go beside the positions instead of in their place.
    path, ctas_per_row, quantile_guess, pdl
        Passed on.
    next_state : bool
        What rows leave goes there, and the state is read alone.
    clamp_pages, drop_masked, max_ctas, compress_ratio
        Passed on.
    """

    seed: int
    index: int
    requests: int
    next_n: int
    width: int
    k: int
    dtype: str
    contents: tuple[str, ...]
    lengths: tuple[str, ...]
    by_row: bool
    pad: int
    shift: int
    state: str
    hints: tuple[str, ...]
    slots: str
    indices_pad: int
    offset: int
    counts: bool
    stats: bool
    page_size: int
    holes: bool
    cache_slots: bool
    path: str
    ctas_per_row: int
    quantile_guess: bool
    pdl: bool
    next_state: bool
    clamp_pages: bool
    drop_masked: bool
    max_ctas: int
    compress_ratio: int

    @property
    def rows(self) -> int:
        return self.requests * self.next_n

    def as_json(self) -> dict[str, Any]:
        return {"op": "decode", **asdict(self)}

    def optional(self) -> dict[str, bool]:
        """Optional arguments of the op, and whether the call has them."""
        return {
            "next_n": self.next_n > 1,
            "seq_lens by row": self.by_row,
            "state": self.state != ABSENT,
            "indices": bool(self.hints),
            "row_slot": self.slots != "own",
            "next_state": self.next_state,
            "counts": self.counts,
            "page_table": self.page_size > 0,
            "slots": self.cache_slots,
            "clamp_pages": self.clamp_pages,
            "drop_masked": self.drop_masked,
            "compress_ratio": self.compress_ratio > 1,
            "ctas_per_row": self.ctas_per_row > 0,
            "max_ctas": self.max_ctas > 0,
            "hint_offset": self.offset != 0,
            "stats": self.stats,
            "quantile_guess": self.quantile_guess,
            "pdl": self.pdl,
        }


def _plannable(
    rows: int, width: int, k: int, dtype: str, path: str, ctas: int = 0, max_ctas: int = 0
) -> bool:
    kind = DTYPES[dtype]
    try:
        plan(rows=rows, width=width, k=k, dtype=kind, path=path, ctas_per_row=ctas, max_ctas=max_ctas)
    except ValueError:
        return False
    return True


def draw_case(seed: int, index: int, *, elements: int, paths: Sequence[str] = PATHS) -> Case:
    """Draw a case of at most about `elements` scores; same arguments, same case."""
    choices = Choices(seed, index)
    rng, pick, some = choices.rng, choices.pick, choices.some
    next_n = int(pick(1, 2, 3, 4, 7, p=(0.6, 0.15, 0.1, 0.1, 0.05)))
    longest = min(elements // next_n, MAX_WIDTH if rng.random() < 0.1 else 1 << 17)
    k = int(pick(*TUNED_K)) if rng.random() < 0.6 else int(2 ** rng.uniform(0, 12.5))
    # Rows no longer than k have nothing to search: most cases are longer.
    shortest = min(k, longest) if rng.random() < 0.8 else 1
    width = max(1, int(2 ** rng.uniform(np.log2(shortest), np.log2(longest))))
    if rng.random() < 0.3:
        width = max(1, min(longest, (1 << int(np.log2(width))) + int(rng.integers(-1, 2))))
    most = max(1, min(elements // (max(width, k) * next_n), 160))
    requests = int(2 ** rng.uniform(0, np.log2(most))) if most > 1 else 1
    dtype = str(pick(*DTYPES))
    servable = [path for path in paths if _plannable(next_n * requests, width, k, dtype, path)]
    path = str(pick(*servable or ["auto"]))
    ctas = int(pick(1, 2, 4, 8, 16)) if rng.random() < 0.4 else 0
    if not _plannable(requests * next_n, width, k, dtype, path, ctas):
        ctas = 0
    state = str(pick(*STATES)) if rng.random() < 0.8 else ABSENT
    hinted = state != ABSENT and bool(rng.random() < 0.6)
    page_size = int(pick(1, 16, 64, 1000)) if rng.random() < 0.25 else 0
    case = Case(
        seed=seed,
        index=index,
        requests=requests,
        next_n=next_n,
        width=width,
        k=k,
        dtype=dtype,
        contents=some(tuple(CONTENTS), 2),
        lengths=some(LENGTHS, 2) if rng.random() < 0.6 else ("full",),
        by_row=bool(next_n > 1 and rng.random() < 0.4),
        pad=int(pick(0, 1, 3, 8, 64)),
        shift=int(pick(0, 0, 1, 2, 3, 5)),
        state=state,
        hints=some(HINTS, 2) if hinted else (),
        slots=str(pick("own", "shuffled", "any")) if state != ABSENT else "own",
        indices_pad=int(pick(0, 0, 1, 5)),
        offset=int(pick(0, 0, 1, -1, 100, -MAX_WIDTH, MAX_WIDTH)) if hinted else 0,
        counts=bool(rng.random() < 0.4),
        stats=bool(rng.random() < 0.5),
        page_size=page_size,
        holes=bool(rng.random() < 0.5),
        cache_slots=bool(page_size and rng.random() < 0.5),
        path=path,
        ctas_per_row=ctas,
        quantile_guess=bool(rng.random() < 0.5),
        pdl=bool(rng.random() < 0.3),
        next_state=bool(rng.random() < 0.2),
        clamp_pages=bool(page_size and rng.random() < 0.5),
        drop_masked=bool(rng.random() < 0.25),
        max_ctas=int(pick(1, 2, 4, 8, 16)) if rng.random() < 0.3 else 0,
        compress_ratio=int(pick(1, 1, 1, 4, 128)),
    )
    if not _plannable(case.rows, width, k, dtype, path, ctas, case.max_ctas):
        case = replace(case, max_ctas=0)
    return case


@dataclass
class Problem:
    """Tensors of a case."""

    logits: Tensor  # [rows, width], with NaN between the rows
    seq_lens: Tensor  # [requests] or [rows] int32
    visible: Tensor  # [rows] int64, at most width
    wanted: Tensor  # [rows, k] int32 positions
    state: TopkState | None
    row_slot: Tensor | None  # [rows] int32
    page_table: Tensor | None  # [requests, pages] int32

    def written_slots(self, case: Case) -> dict[int, int]:
        """Row by the slot it writes: the last row of each request that has one."""
        if self.state is None or case.next_state:
            return {}
        next_n = case.next_n
        last = range(next_n - 1, len(self.logits), next_n)
        slots = range(len(last)) if self.row_slot is None else self.row_slot[next_n - 1 :: next_n].tolist()
        return {slot: row for slot, row in zip(slots, last, strict=True) if 0 <= slot < self.state.slots}

    def wanted_slots(self, case: Case) -> Tensor:
        """Cache slots of the wanted positions."""
        assert self.page_table is not None
        request = torch.arange(case.rows, device=self.wanted.device) // case.next_n
        return translate_positions(self.wanted, self.page_table, case.page_size, request)


def make_problem(case: Case, device: str, oracle: Oracle = exact_topk) -> Problem:
    """Tensors of a case on a device, and the answer that `oracle` gives."""
    draw = torch.Generator(device=device).manual_seed(case.seed * 1_000_003 + case.index)
    logits = strided(case.rows, case.width, case.pad, case.shift, DTYPES[case.dtype], device)
    for turn, kind in enumerate(case.contents):
        rows = logits[turn :: len(case.contents)]
        if len(rows):
            rows.copy_(CONTENTS[kind](len(rows), case.width, case.k, draw, DTYPES[case.dtype]))
    count = case.rows if case.by_row else case.requests
    seq_lens = torch.stack([_length(case.lengths[i % len(case.lengths)], case, draw) for i in range(count)])
    if case.compress_ratio > 1:  # a length counts keys, and not all of them make up a whole score
        more = torch.randint(case.compress_ratio, seq_lens.shape, generator=draw, device=device)
        seq_lens = seq_lens * case.compress_ratio + more
    seq_lens = seq_lens.to(torch.int32)
    page_table = _page_table(case, draw)
    keys = seq_lens.to(torch.int64)
    if not case.by_row:
        keys = row_lengths(seq_lens, case.rows, case.next_n)
    covered = case.width
    if case.clamp_pages and page_table is not None:
        covered = min(covered, page_table.shape[1] * case.page_size)
    visible = (keys.clamp(min=0) // case.compress_ratio).clamp(max=covered)
    largest = oracle(logits, visible, case.k)
    wanted = drop_masked_positions(logits, largest) if case.drop_masked else largest
    state = row_slot = None
    if case.state != ABSENT:
        slots = case.requests if case.slots == "own" else case.rows + 2
        row_slot = None if case.slots == "own" else _row_slots(case, slots, draw)
        state = TopkState.of(
            _words(case.state, _kth(logits, largest)[torch.arange(slots, device=device) % case.rows], draw),
            _indices(case, slots, wanted, draw) if case.hints else None,
            case.k,
        )
    return Problem(logits, seq_lens, visible, wanted, state, row_slot, page_table)


def _indices(case: Case, slots: int, wanted: Tensor, draw: Draw) -> Tensor:
    pitch = case.k + case.indices_pad
    indices = torch.empty(slots, pitch, dtype=torch.int32, device=draw.device)[:, : case.k]
    for slot in range(slots):
        # Which row a slot serves does not matter: its own choice is only one more kind of content.
        row = wanted[min(slot * case.next_n, case.rows - 1)]
        indices[slot] = _hint(case.hints[slot % len(case.hints)], row, case, draw)
    return indices


def _page_table(case: Case, draw: Draw) -> Tensor | None:
    if not case.page_size:
        return None
    pages = max(1, int(draw_integer(1, 2 * (case.width // case.page_size) + 2, draw)))
    largest = (2**31 - 1) // case.page_size - 1
    shape = (case.requests, pages)
    table = torch.randint(largest, shape, generator=draw, device=draw.device, dtype=torch.int32)
    if case.holes:
        table = torch.where(torch.rand(shape, generator=draw, device=draw.device) < 0.3, -1 - table, table)
    return table


def strided(rows: int, width: int, pad: int, shift: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows with `pad` elements of NaN behind each, in a buffer in which the first begins at `shift`."""
    buffer = torch.full((rows * (width + pad) + shift + 16,), float("nan"), dtype=dtype, device=device)
    return buffer[shift : shift + rows * (width + pad)].view(rows, width + pad)[:, :width]


def _length(kind: str, case: Case, draw: Draw) -> Tensor:
    if kind == "full":
        return draw_integer(case.width, case.width, draw)
    if kind == "near_k":
        return draw_integer(case.k - 2, case.k + case.next_n + 3, draw)
    if kind == "tiny":
        return draw_integer(-3, 5, draw)
    if kind == "beyond":
        return draw_integer(case.width, case.width + 3000, draw)
    return draw_integer(0, case.width + 2, draw)


def _row_slots(case: Case, slots: int, draw: Draw) -> Tensor:
    """Slots of the rows: the last rows of two requests never share one, because both would write it."""
    order = torch.randperm(slots, generator=draw, device=draw.device)[: case.rows].to(torch.int32)
    if case.slots == "shuffled":
        order = order[: case.requests].repeat_interleave(case.next_n)
    choice = torch.rand(case.rows, generator=draw, device=draw.device)
    order = torch.where(choice < 0.1, -1, order)
    return torch.where(choice > 0.95, slots + 7, order).to(torch.int32)


def _hint(kind: str, result: Tensor, case: Case, draw: Draw) -> Tensor:
    k, device = case.k, draw.device

    def within(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (k,), generator=draw, device=device)

    if kind == "true":
        # Positions as the offset will move them, in any order, padding kept.
        order = torch.randperm(k, generator=draw, device=device)
        shuffled = result.to(torch.int64)[order]
        return torch.where(shuffled >= 0, (shuffled - case.offset).clamp(-(2**31), 2**31 - 1), -1)
    if kind == "half":
        keep = torch.rand(k, generator=draw, device=device) < 0.5
        return torch.where(keep, result.to(torch.int64), within(0, case.width))
    if kind == "random":
        return within(0, case.width)
    if kind == "any_int32":
        return within(-(2**31), 2**31)
    if kind == "one_position":
        return draw_integer(0, case.width, draw).expand(k)
    constant = {"minus_one": -1, "zero": 0, "past_the_end": case.width}[kind]
    return torch.full((k,), constant, dtype=torch.int64, device=device)


def _kth(logits: Tensor, wanted: Tensor) -> Tensor:
    """The k-th value of every row, fp32; of an empty one, its first."""
    values = logits.gather(1, wanted.clamp(min=0).to(torch.int64)).float()
    keys = torch.where(wanted >= 0, order_key(values), 1 << 40)
    return values.gather(1, keys.argmin(dim=1, keepdim=True))[:, 0]


def _words(kind: str, kth: Tensor, draw: Draw) -> Tensor:
    """Whole slots; `kth` holds values that those may expect, one a slot."""
    slots, device = len(kth), draw.device

    def normal() -> Tensor:
        return torch.randn(slots, generator=draw, device=device)

    def any_size() -> Tensor:
        return torch.empty(slots, device=device).uniform_(-130, 130, generator=draw).exp2()

    def any_bits() -> Tensor:
        limits = torch.iinfo(torch.int32)
        drawn = torch.randint(limits.min, limits.max + 1, (slots,), generator=draw, device=device)
        return drawn.to(torch.int32).view(torch.float32)

    def spreads(by_value: bool | None) -> Tensor:
        """Two spreads of moderate size, and the last bit that says which of them to go by."""
        halves = (0.05 * torch.stack([normal(), normal()], dim=1).abs()).to(torch.bfloat16).view(torch.int16)
        bit = torch.randint(2, (slots,), generator=draw, device=device)
        chosen = bit if by_value is None else torch.full_like(bit, by_value)
        halves[:, 0] = (halves[:, 0] & ~1) | chosen.to(torch.int16)
        return halves.contiguous().view(torch.float32)[:, 0]

    if kind == "bits":
        return torch.stack([any_bits() for _ in range(STATE_FLOATS)], dim=1)
    words = torch.zeros(slots, STATE_FLOATS, device=device)
    if kind == "share":
        words[:, 0] = torch.rand(slots, generator=draw, device=device)
    elif kind == "window":  # what short rows leave: negative numbers of all sizes
        near = torch.empty(slots, device=device).uniform_(-4, 4, generator=draw).exp2()
        is_near = torch.rand(slots, generator=draw, device=device) < 0.5
        words[:, 0] = -torch.where(is_near, near, any_size())
    elif kind in ("zscore", "value", "either"):  # near those that kernels leave, or far off
        by_value = {"zscore": False, "value": True, "either": None}[kind]
        words[:, 0] = STATE_VALUE_ONLY if kind == "value" else STATE_ZSCORE_ORIGIN + 4.0 * normal()
        words[:, 1] = kth + 0.05 * normal()
        words[:, 2] = normal().abs()
        words[:, 3] = spreads(by_value)
    elif kind == "absurd":  # a z-score or a value, and nonsense beside it
        is_zscore = torch.rand(slots, generator=draw, device=device) < 0.5
        words[:, 0] = torch.where(is_zscore, STATE_ZSCORE_ORIGIN + 8.0 * normal(), STATE_VALUE_ONLY)
        words[:, 1] = any_size() * normal().sign()
        words[:, 2] = any_size() * normal().sign()
        words[:, 3] = any_bits()
    else:
        words[:, 0] = {
            "unknown": STATE_UNKNOWN,
            "zero": 0.0,
            "one": 1.0,
            "infinite": STATE_INFINITE,
            "masked": STATE_MASKED,
            "nan": np.nan,
            "inf": np.inf,
            "huge": 3e38,
        }[kind]
        if kind in ("nan", "inf", "huge"):
            words[:] = words[:, :1].clone()
    return words
