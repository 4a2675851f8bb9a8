"""Random calls of the op: shapes, layouts, contents, hints and everything else that an engine may pass.

A case is a few plain values drawn from ``(seed, index)``; its tensors are drawn from the same pair, so a
case can be made again from two numbers on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gvr_topk.contract import (
    INFINITE,
    MASKED,
    MAX_WIDTH,
    PLACES,
    STATE_FLOATS,
    VALUE_ONLY,
    exact_topk,
    order_key,
    row_lengths,
)
from gvr_topk.gate import plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PATHS = ("auto", "cluster", "radix", "gvr")
TUNED_K = (512, 1024, 2048)
POISON = -7777
GUARD_COLUMNS = 3

LENGTHS = ("full", "random", "near_k", "tiny", "beyond")
HINTS = ("true", "half", "random", "any_int32", "minus_one", "zero", "one_position", "past_the_end")
GUESSES = (
    *("unknown", "share", "place", "value", "either", "absurd", "infinite", "masked", "window"),
    *("zero", "one", "nan", "inf", "huge", "bits"),
)

Draw = torch.Generator
Oracle = Callable[[Tensor, Tensor, int], Tensor]


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
        Kinds of sequence length (`LENGTHS`), taken in turn by the requests.
    pad, shift : int
        Elements between rows, and by which the first row misses its alignment.
    hints : tuple of str
        Kinds of hint (`HINTS`), taken in turn by the slots; empty: no prior, whether there is a guess_state
        or not.
    slots : str
        ``own`` (no row_slot), ``shuffled`` (one per request, some without), ``any`` (rows of a request
        differ).
    prior_pad, offset : int
        Elements between slots, and the hint offset.
    guess : str
        Content of guess_state (`GUESSES`), or ``absent``.
    stats : bool
    page_size : int
        0: no page table.
    path, ctas_per_row, quantile_guess, pdl
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
    pad: int
    shift: int
    hints: tuple[str, ...]
    slots: str
    prior_pad: int
    offset: int
    guess: str
    stats: bool
    page_size: int
    path: str
    ctas_per_row: int
    quantile_guess: bool
    pdl: bool

    @property
    def rows(self) -> int:
        return self.requests * self.next_n

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _plannable(rows: int, width: int, k: int, dtype: str, path: str, ctas: int = 0) -> bool:
    try:
        plan(rows=rows, width=width, k=k, dtype=DTYPES[dtype], path=path, ctas_per_row=ctas)
    except ValueError:
        return False
    return True


def draw_case(seed: int, index: int, *, elements: int, paths: Sequence[str] = PATHS) -> Case:
    """Draw a case of at most about `elements` scores; same arguments, same case."""
    rng = np.random.default_rng((seed, index))

    def pick(*choices: Any, p: Sequence[float] | None = None) -> Any:
        return choices[int(rng.choice(len(choices), p=p))]

    def some(choices: Sequence[str], most: int = 2) -> tuple[str, ...]:
        return tuple(str(choice) for choice in rng.choice(choices, size=int(rng.integers(1, most + 1))))

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
    hinted = rng.random() < 0.6
    guess = str(pick("absent", *GUESSES)) if hinted else "absent"
    if not hinted and rng.random() < 0.6:
        guess = str(pick(*GUESSES))
    has_slots = hinted or guess != "absent"
    return Case(
        seed=seed,
        index=index,
        requests=requests,
        next_n=next_n,
        width=width,
        k=k,
        dtype=dtype,
        contents=some(tuple(CONTENTS)),
        lengths=some(LENGTHS) if rng.random() < 0.6 else ("full",),
        pad=int(pick(0, 1, 3, 8, 64)),
        shift=int(pick(0, 0, 1, 2, 3, 5)),
        hints=some(HINTS) if hinted else (),
        slots=str(pick("own", "shuffled", "any")) if has_slots else "own",
        prior_pad=int(pick(0, 0, 1, 5)),
        offset=int(pick(0, 0, 1, -1, 100, -MAX_WIDTH, MAX_WIDTH)) if hinted else 0,
        guess=guess,
        stats=bool(rng.random() < 0.5),
        page_size=int(pick(1, 16, 64, 1000)) if rng.random() < 0.2 else 0,
        path=path,
        ctas_per_row=ctas,
        quantile_guess=bool(rng.random() < 0.5),
        pdl=bool(rng.random() < 0.3),
    )


@dataclass
class Problem:
    """Tensors of a case."""

    logits: Tensor  # [rows, width], with NaN between the rows
    seq_lens: Tensor  # [requests] int32
    visible: Tensor  # [rows] int64, at most width
    want: Tensor  # [rows, k] int32 positions
    prior: Tensor | None  # [slots, k] int32
    row_slot: Tensor | None  # [rows] int32
    guess_state: Tensor | None  # [slots, 4] float32
    page_table: Tensor | None  # [requests, pages] int32

    def written_slots(self, next_n: int) -> dict[int, int]:
        """Row by the slot it writes: the last row of each request that has one."""
        per_slot = self.prior if self.prior is not None else self.guess_state
        if per_slot is None:
            return {}
        last = range(next_n - 1, len(self.logits), next_n)
        slots = range(len(last)) if self.row_slot is None else self.row_slot[next_n - 1 :: next_n].tolist()
        return {slot: row for slot, row in zip(slots, last, strict=True) if 0 <= slot < len(per_slot)}


def make_problem(case: Case, device: str, oracle: Oracle = exact_topk) -> Problem:
    """Tensors of a case on a device, and the answer that `oracle` gives."""
    draw = torch.Generator(device=device).manual_seed(case.seed * 1_000_003 + case.index)
    logits = _strided(case.rows, case.width, case.pad, case.shift, DTYPES[case.dtype], device)
    for turn, kind in enumerate(case.contents):
        rows = logits[turn :: len(case.contents)]
        if len(rows):
            rows.copy_(CONTENTS[kind](len(rows), case.width, case.k, draw, DTYPES[case.dtype]))
    seq_lens = torch.stack(
        [_length(case.lengths[r % len(case.lengths)], case, draw) for r in range(case.requests)]
    ).to(torch.int32)
    visible = row_lengths(seq_lens, case.rows, case.next_n).clamp(max=case.width)
    want = oracle(logits, visible, case.k)
    prior = row_slot = guess_state = None
    if case.hints or case.guess != "absent":
        slots = case.requests if case.slots == "own" else case.rows + 2
        row_slot = None if case.slots == "own" else _row_slots(case, slots, draw)
    if case.hints:
        prior = torch.empty(slots, case.k + case.prior_pad, dtype=torch.int32, device=device)[:, : case.k]
        for slot in range(slots):
            # Which row a slot serves does not matter: its own hint is only one more kind of content.
            row = want[min(slot * case.next_n, case.rows - 1)]
            prior[slot] = _hint(case.hints[slot % len(case.hints)], row, case, draw)
    if case.guess != "absent":
        kth = _kth(logits, want)[torch.arange(slots, device=device) % case.rows]
        guess_state = _guess_state(case.guess, kth, draw)
    page_table = None
    if case.page_size:
        pages = max(1, int(_integer(1, 2 * (case.width // case.page_size) + 2, draw)))
        largest = (2**31 - 1) // case.page_size - 1
        page_table = torch.randint(
            largest, (case.requests, pages), generator=draw, device=device, dtype=torch.int32
        )
    return Problem(logits, seq_lens, visible, want, prior, row_slot, guess_state, page_table)


def _strided(rows: int, width: int, pad: int, shift: int, dtype: torch.dtype, device: str) -> Tensor:
    buffer = torch.full((rows * (width + pad) + shift + 16,), float("nan"), dtype=dtype, device=device)
    return buffer[shift : shift + rows * (width + pad)].view(rows, width + pad)[:, :width]


def _integer(low: int, high: int, draw: Draw) -> Tensor:
    """One integer of ``[low, high)``."""
    return torch.randint(low, max(high, low + 1), (), generator=draw, device=draw.device)


def _length(kind: str, case: Case, draw: Draw) -> Tensor:
    if kind == "full":
        return _integer(case.width, case.width, draw)
    if kind == "near_k":
        return _integer(case.k - 2, case.k + case.next_n + 3, draw)
    if kind == "tiny":
        return _integer(-3, 5, draw)
    if kind == "beyond":
        return _integer(case.width, case.width + 3000, draw)
    return _integer(0, case.width + 2, draw)


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
        return _integer(0, case.width, draw).expand(k)
    constant = {"minus_one": -1, "zero": 0, "past_the_end": case.width}[kind]
    return torch.full((k,), constant, dtype=torch.int64, device=device)


def _kth(logits: Tensor, want: Tensor) -> Tensor:
    """The k-th value of every row, fp32; of an empty one, its first."""
    values = logits.gather(1, want.clamp(min=0).to(torch.int64)).float()
    keys = torch.where(want >= 0, order_key(values), 1 << 40)
    return values.gather(1, keys.argmin(dim=1, keepdim=True))[:, 0]


def _guess_state(kind: str, kth: Tensor, draw: Draw) -> Tensor:
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
    state = torch.zeros(slots, STATE_FLOATS, device=device)
    centre = sum(PLACES) / 2
    if kind == "share":
        state[:, 0] = torch.rand(slots, generator=draw, device=device)
    elif kind == "window":  # what short rows leave: negative numbers of all sizes
        near = torch.empty(slots, device=device).uniform_(-4, 4, generator=draw).exp2()
        is_near = torch.rand(slots, generator=draw, device=device) < 0.5
        state[:, 0] = -torch.where(is_near, near, any_size())
    elif kind in ("place", "value", "either"):  # near those that kernels leave, or far off
        by_value = {"place": False, "value": True, "either": None}[kind]
        state[:, 0] = VALUE_ONLY if kind == "value" else centre + 4.0 * normal()
        state[:, 1] = kth + 0.05 * normal()
        state[:, 2] = normal().abs()
        state[:, 3] = spreads(by_value)
    elif kind == "absurd":  # a place or a value, and nonsense beside it
        is_place = torch.rand(slots, generator=draw, device=device) < 0.5
        state[:, 0] = torch.where(is_place, centre + 8.0 * normal(), VALUE_ONLY)
        state[:, 1] = any_size() * normal().sign()
        state[:, 2] = any_size() * normal().sign()
        state[:, 3] = any_bits()
    else:
        state[:, 0] = {
            "unknown": -1.0,
            "zero": 0.0,
            "one": 1.0,
            "infinite": INFINITE,
            "masked": MASKED,
            "nan": np.nan,
            "inf": np.inf,
            "huge": 3e38,
        }[kind]
        if kind in ("nan", "inf", "huge"):
            state[:] = state[:, :1].clone()
    return state


# ---------------------------------------------------------------- contents


def _normal(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, n, generator=draw, device=draw.device)


def _relu(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """A share of positive scores around ``k / n``, above a plateau of zeros."""
    shift = torch.randn(rows, 1, generator=draw, device=draw.device) - 1.5
    return (_normal(rows, n, k, draw, dtype) + shift).relu()


def _narrow(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return 128.6 + 0.1 * torch.rand(rows, n, generator=draw, device=draw.device)


def _constant(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    values = torch.tensor([0.0, -0.0, 1.5, np.nan, np.inf, -np.inf, -6e4], device=draw.device)
    return values[torch.randint(len(values), (rows, 1), generator=draw, device=draw.device)].expand(rows, n)


def _few_values(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, (rows, n), generator=draw, device=draw.device).float()


def _ties_at_k(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """About k values above a plateau that straddles the k-th place, in any order."""
    above = _integer(0, min(n, k) + 1, draw)
    equal = _integer(0, min(n, 8 * k) + 1, draw)
    rank = torch.rand(rows, n, generator=draw, device=draw.device).argsort(dim=1)
    values = torch.randn(rows, n, generator=draw, device=draw.device).abs()
    return torch.where(rank < above, 1 + values, torch.where(rank < above + equal, 0.0, -1 - values))


def _bits(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """Any bit pattern: every NaN, infinity, denormal and exponent."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    drawn = torch.randint(limits.min, limits.max + 1, (rows, n), generator=draw, device=draw.device)
    return drawn.to(integer).view(dtype)


def _ulps(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """A crowd within ten units in the last place, among ordinary values."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    one = torch.ones((), dtype=dtype, device=draw.device).view(integer)
    near = (one + torch.randint(10, (rows, n), generator=draw, device=draw.device)).to(integer).view(dtype)
    ordinary = torch.randn(rows, n, generator=draw, device=draw.device).to(dtype)
    crowd = torch.rand(rows, n, generator=draw, device=draw.device) < 0.7
    return torch.where(crowd, near, ordinary)


def _denormals(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    smallest = {torch.float32: 1e-45, torch.bfloat16: 1e-40, torch.float16: 6e-8}[dtype]
    drawn = torch.randint(-50, 51, (rows, n), generator=draw, device=draw.device)
    return (drawn.double() * smallest).to(dtype)


def _masked(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """Mostly -inf, with fewer or more than k ordinary values left."""
    share = torch.rand(rows, 1, generator=draw, device=draw.device) * min(1.0, 2 * k / n)
    keep = torch.rand(rows, n, generator=draw, device=draw.device) < share
    return torch.where(keep, _normal(rows, n, k, draw, dtype), float("-inf"))


def _special(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    values = torch.tensor([np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4, -6e4], device=draw.device)
    drawn = values[torch.randint(len(values), (rows, n), generator=draw, device=draw.device)]
    share = torch.rand(rows, 1, generator=draw, device=draw.device) ** 4
    replaced = torch.rand(rows, n, generator=draw, device=draw.device) < share
    return torch.where(replaced, drawn, _normal(rows, n, k, draw, dtype))


def _ascending(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return _normal(rows, n, k, draw, dtype).sort(dim=1).values


def _descending(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    return _ascending(rows, n, k, draw, dtype).flip(1)


def _one_chunk(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """The whole result in neighbouring positions: one thread, warp or CTA holds it."""
    scores = _normal(rows, n, k, draw, dtype)
    start = int(_integer(0, max(1, n - k), draw))
    scores[:, start : start + k] += 50
    return scores


def _outlier(rows: int, n: int, k: int, draw: Draw, dtype: torch.dtype) -> Tensor:
    """Tiny values beside one that stretches the range."""
    scores = _normal(rows, n, k, draw, dtype) * (1e-30 if dtype != torch.float16 else 1e-4)
    scores[:, int(_integer(0, n, draw))] = 3e38 if dtype != torch.float16 else 6e4
    return scores


CONTENTS: dict[str, Callable[[int, int, int, Draw, torch.dtype], Tensor]] = {
    "normal": _normal,
    "relu": _relu,
    "narrow": _narrow,
    "constant": _constant,
    "few_values": _few_values,
    "ties_at_k": _ties_at_k,
    "bits": _bits,
    "ulps": _ulps,
    "denormals": _denormals,
    "masked": _masked,
    "special": _special,
    "ascending": _ascending,
    "descending": _descending,
    "one_chunk": _one_chunk,
    "outlier": _outlier,
}
"""Kinds of rows: ``(rows, width, k, generator, dtype) -> [rows, width]``, cast to the dtype by the caller."""
