"""What one step leaves for the next may be anything: results are exact, and no other slot is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from contents import SHAPES
from contents import draw as generator
from launches import skip_unserved
from oracle import PATHS, clone, columns, exact, full_lengths, new_state, new_stats, run, run_forced
from torch import Tensor

from gvr_topk.constants import STATE_FLOATS, STATE_INFINITE, STATE_MASKED, STATE_UNKNOWN, StatsColumn
from gvr_topk.contract import DTYPES
from gvr_topk.policy import plan
from gvr_topk.state import TopkState

K = 2048
INT32 = torch.iinfo(torch.int32)

LONG = [name for name in SHAPES if name not in ("small row", "resident, 32768", "262144")]


def chain(rows: int, width: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Scores of one step after the other, of which 90 % of the variance stays."""
    scores = torch.randn(rows, width, device="cuda", generator=draw)
    while True:
        yield scores
        scores = 0.9**0.5 * scores + 0.1**0.5 * torch.randn(rows, width, device="cuda", generator=draw)


def some(scores: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Which positions a share of all is, drawn by chance."""
    return torch.rand(scores.shape, device="cuda", generator=draw) < share


Kind = Callable[[Tensor, torch.Generator], Tensor]

KINDS: dict[str, Kind] = {
    "ordinary": lambda x, draw: x,
    "scaled": lambda x, draw: 1000.0 * x,
    "tied": lambda x, draw: (2.0 * x).round(),
    "relu": lambda x, draw: (x - 1.5).relu(),
    "constant": lambda x, draw: torch.full_like(x, 0.5),
    "half masked": lambda x, draw: torch.where(some(x, 0.5, draw), x, -torch.inf),
    "k-th -inf": lambda x, draw: torch.where(some(x, 0.5 * K / x.shape[1], draw), x, -torch.inf),
    "k-th +inf": lambda x, draw: torch.where(some(x, 2.0 * K / x.shape[1], draw), torch.inf, x),
    "k-th NaN": lambda x, draw: torch.where(some(x, 2.0 * K / x.shape[1], draw), torch.nan, x),
    "some +inf": lambda x, draw: torch.where(some(x, 0.5 * K / x.shape[1], draw), torch.inf, x),
    "some NaN": lambda x, draw: torch.where(some(x, 0.5 * K / x.shape[1], draw), torch.nan, x),
    "all +inf": lambda x, draw: torch.full_like(x, torch.inf),
    "all NaN": lambda x, draw: torch.full_like(x, torch.nan),
    "all -inf": lambda x, draw: torch.full_like(x, -torch.inf),
}
"""Kinds of rows, by what stands at the k-th place."""


def check(logits: Tensor, state: TopkState, ctas: int = 0, **more: Tensor) -> None:
    """One exact step, which leaves something that a step may leave."""
    lengths = full_lengths(logits)
    exact(logits, lengths, K, ctas=ctas, state=state, **more)
    left = state.words[:, 0]
    assert bool((left.isfinite() & (left <= STATE_MASKED)).all()), state.words


def random_bits(rows: int, draw: torch.Generator) -> Tensor:
    """Words of any content: every NaN, infinity, denormal and exponent."""
    bits = torch.randint(
        INT32.min, INT32.max + 1, (rows, STATE_FLOATS), device="cuda", generator=draw, dtype=torch.int64
    )
    return bits.to(torch.int32).view(torch.float32)


def test_the_shapes_reach_every_kernel() -> None:
    families = {
        name: plan(rows=rows, width=width, k=K, ctas_per_row=ctas).family
        for name, (width, rows, ctas) in SHAPES.items()
    }
    for name, family in families.items():
        kind = name.split(",")[0].split(" x ")[0].replace(" ", "_")
        assert kind not in ("small_row", "resident", "streaming") or family == kind
    assert set(families.values()) == {"small_row", "resident", "streaming"}


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_state_without_indices(shape: str, dtype: torch.dtype, statistics: bool) -> None:
    width, rows, ctas = SHAPES[shape]
    state = new_state(rows, K)
    steps = chain(rows, width, generator(width))
    for step in range(6):
        more = {"stats": new_stats(rows)} if statistics else {}
        check(next(steps).to(dtype), state, ctas, **more)
        if statistics:
            assert set(columns(more["stats"])[StatsColumn.HITS]) == {-1}
        # A first step that misses may leave nothing.
        known = state.words[:, 0] != STATE_UNKNOWN
        assert step < 2 or dtype != torch.float32 or bool(known.all()), step


SHARED = {
    "small row": (8192, 96),
    "resident": (65_536, 6),
    "resident, off alignment": (65_537, 6),
    "streaming": (131_072, 96),
    "streaming, few rows": (1 << 20, 4),
    "claimed, small row": (8192, 1500),
    "claimed, resident": (40_000, 520),
    "claimed, unaligned": (40_001, 520),
    "claimed, streaming": (131_072, 520),
}
"""Width and requests of rows that share slots: more than the GPU runs at once, a few, and so many that slots
are claimed by another launch first."""


def shared_slots(requests: int, next_n: int, how: str) -> Tensor:
    """Slot of each row: one of all, two in turns, or drawn by chance from a few and none."""
    if how == "one slot":
        row_slot = torch.full((requests,), 1)
    elif how == "two in turns":
        row_slot = torch.arange(requests) % 2
    else:
        row_slot = torch.randint(-1, 3, (requests,), generator=torch.Generator().manual_seed(requests))
    return row_slot.to(torch.int32).repeat_interleave(next_n).to("cuda")


@pytest.mark.parametrize("how", ["one slot", "two in turns", "by chance"])
@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHARED)
def test_of_requests_that_name_one_slot_the_last_one_leaves_its_state(
    shape: str, path: str, next_n: int, how: str
) -> None:
    """Positions are never a mixture, and all that is left is what the last request leaves alone."""
    width, requests = SHARED[shape]
    skip_unserved(path, width)
    rows, draw = requests * next_n, generator(width + next_n)
    lengths = torch.full((requests,), width, dtype=torch.int32, device="cuda")
    lengths[::5] = K // 2  # short rows, which leave their positions and no words
    row_slot = shared_slots(requests, next_n, how)
    slots = row_slot[next_n - 1 :: next_n].tolist()
    # The last row of the last request that names each slot.
    last = {slot: next_n * request + next_n - 1 for request, slot in enumerate(slots) if slot >= 0}
    alone = torch.full_like(row_slot, -1)
    for slot, row in last.items():
        alone[row - next_n + 1 : row + 1] = slot
    state, steps = new_state(4, K, keep_indices=True), chain(rows, width, draw)
    for _ in range(3):
        logits, before, apart, observed = next(steps), clone(state), clone(state), clone(state)
        got = exact(logits, lengths, K, next_n=next_n, path=path, state=state, row_slot=row_slot)
        run(logits, lengths, K, next_n=next_n, path=path, state=apart, row_slot=alone)
        step = {"next_n": next_n, "path": path, "state": observed, "row_slot": row_slot}
        run_forced(logits, lengths, K, 0, stats=new_stats(rows), **step)
        assert torch.equal(observed.indices, state.indices)
        assert torch.equal(state.words.view(torch.int32), apart.words.view(torch.int32))
        assert torch.equal(state.indices, apart.indices)
        for slot in range(4):
            left = got[last[slot]] if slot in last else before.indices[slot]
            assert torch.equal(state.indices[slot], left), slot


@pytest.mark.parametrize("shape", SHARED)
def test_words_of_a_slot_that_requests_share_are_those_of_one(shape: str) -> None:
    """Without positions, too, they are no mixture."""
    width, requests = SHARED[shape]
    logits = next(chain(requests, width, generator(width)))
    lengths, row_slot = full_lengths(logits), torch.arange(requests, dtype=torch.int32, device="cuda")
    each = new_state(requests, K)
    run(logits, lengths, K, path="no_hint", state=each, row_slot=row_slot)
    possible = {tuple(words) for words in each.words.view(torch.int32).tolist()}
    for _ in range(20):
        state = new_state(requests, K)
        run(logits, lengths, K, path="no_hint", state=state, row_slot=torch.zeros_like(row_slot))
        assert tuple(state.words[0].view(torch.int32).tolist()) in possible
        assert bool((state.words[1:, 0] == STATE_UNKNOWN).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_bits_as_state(shape: str, kind: str) -> None:
    width, rows, ctas = SHAPES[shape]
    draw = generator(len(kind) + width)
    for _ in range(4 if rows > 8 else 12):
        scores = KINDS[kind](torch.randn(rows, width, device="cuda", generator=draw), draw)
        state = TopkState.of(random_bits(rows, draw), None, K)
        for _ in range(2):  # and what that leaves
            check(scores, state, ctas)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_row_over_steps(shape: str, kind: str, dtype: torch.dtype) -> None:
    width, rows, ctas = SHAPES[shape]
    draw = generator(width + rows)
    state, steps = new_state(rows, K), chain(rows, width, draw)
    for _ in range(4):
        check(KINDS[kind](next(steps), draw).to(dtype), state, ctas)


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_a_batch_take_what_others_have_left(seed: int) -> None:
    """Rows of all kinds, and slots that go round: each finds the state of another kind."""
    width, draw = 131_072, generator(seed)
    state, steps = new_state(len(KINDS), K), chain(len(KINDS), width, draw)
    slots = torch.arange(len(KINDS), dtype=torch.int32, device="cuda")
    for _ in range(len(KINDS) + 1):
        scores = next(steps)
        logits = torch.stack(
            [kind(scores[row : row + 1], draw)[0] for row, kind in enumerate(KINDS.values())]
        )
        check(logits, state, row_slot=slots)
        slots = slots.roll(1)


@pytest.mark.parametrize(
    ("kind", "left"),
    [("k-th +inf", STATE_INFINITE), ("k-th NaN", STATE_INFINITE), ("k-th -inf", STATE_MASKED)],
)
@pytest.mark.parametrize("shape", LONG)
def test_infinite_and_masked_rows_are_remembered(shape: str, kind: str, left: float) -> None:
    width, rows, ctas = SHAPES[shape]
    draw = generator(width)
    state, steps = new_state(rows, K), chain(rows, width, draw)
    for _ in range(3):
        check(KINDS[kind](next(steps), draw), state, ctas)
    assert state.words[:, 0].tolist() == [left] * rows


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ["k-th -inf", "k-th +inf", "k-th NaN", "half masked"])
@pytest.mark.parametrize("shape", ["resident, 32768", "streaming, 262144"])
def test_what_is_settled_apart_under_the_sanitizers(shape: str, kind: str) -> None:
    width, rows, ctas = SHAPES[shape]
    draw = generator(width)
    state, steps = new_state(rows, K), chain(rows, width, draw)
    for _ in range(2):
        check(KINDS[kind](next(steps), draw), state, ctas)
