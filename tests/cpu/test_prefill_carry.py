"""The prefill op on slices of the rows' keys: whatever the slices, the result is that of the whole rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import ROWS, WIDTH, in_windows, int32, scores
from torch import Tensor

from gvr_topk import PrefillCarry, indexer_topk_prefill
from gvr_topk.arguments import PrefillSliceArguments
from gvr_topk.constants import FLAG_PDL, MAX_WIDTH
from gvr_topk.contract import DTYPES

OP = torch.ops.gvr_topk.indexer_topk_prefill_slice.default
K = 8
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF, NAN = float("inf"), float("nan")


STARTS, ENDS = int32(0, 3, 58, 20, -5, 40), int32(WIDTH, 50, WIDTH, 29, 7, 40)


def in_slices(
    logits: Tensor, starts: Tensor, ends: Tensor, bounds: Sequence[int], kept: PrefillCarry, **options: Any
) -> Tensor:
    """Select from the columns between the bounds, one slice after the other; options are for the last one."""
    rows, k = len(logits), kept.k
    for begin, end in itertools.pairwise(bounds):
        given_: dict[str, Any] = {"carry": kept, "column": begin}
        if end == bounds[-1]:
            out = torch.full((rows, k + 2), -7, dtype=torch.int32)
            got = indexer_topk_prefill(logits[:, begin:end], starts, ends, k, **given_, out=out, **options)
            assert got is out
            assert bool((out[:, k:] == -7).all()) and bool((kept.words[:rows, 0] == 0).all())
            return out[:, :k]
        assert indexer_topk_prefill(logits[:, begin:end], starts, ends, k, **given_) is None
    raise AssertionError("no slice")


# ---------------------------------------------------------------- any slices

VALUES = st.sampled_from([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1.0, 1.5, 2.0, 6e4, -6e4])
ENDS_OF_WINDOWS = st.one_of(st.integers(-3, 45), st.sampled_from([INT_MIN, INT_MAX]))


@st.composite
def rows_in_slices(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, list[int], int, int]:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    cuts = draw(st.lists(st.integers(0, width), max_size=6))
    spare = draw(st.sampled_from([0, 5]))
    columns = [draw(st.lists(VALUES, min_size=width, max_size=width)) for _ in range(rows)]
    logits = torch.tensor(columns).to(draw(st.sampled_from(DTYPES)))
    starts, ends = ([draw(ENDS_OF_WINDOWS) for _ in range(rows)] for _ in range(2))
    bounds = [0, *sorted(cuts), width]
    return logits, int32(*starts), int32(*ends), bounds, draw(st.integers(1, 12)), rows + spare


@settings(max_examples=400, deadline=None)
@given(rows_in_slices())
def test_any_slices_give_what_a_sort_of_the_whole_row_gives(
    case: tuple[Tensor, Tensor, Tensor, list[int], int, int],
) -> None:
    """Slices may be empty and narrower than k; the second time the carry holds what the first one left."""
    logits, starts, ends, bounds, k, rows = case
    kept = PrefillCarry(rows, k)
    for turn in range(2):
        got = in_slices(logits, starts, ends, bounds, kept)
        assert got.tolist() == in_windows(logits, starts, ends, k), turn


@pytest.mark.parametrize("step", [1, 7, 8, 9, 63, 64])
def test_one_carry_serves_every_dtype(step: int) -> None:
    bounds = [*range(0, WIDTH, step), WIDTH]
    kept = PrefillCarry(ROWS, K)
    for dtype in DTYPES:
        got = in_slices(scores().to(dtype), STARTS, ENDS, bounds, kept)
        assert got.tolist() == in_windows(scores().to(dtype), STARTS, ENDS, K)


def test_the_last_columns_of_the_longest_row() -> None:
    kept, out = PrefillCarry(1, 2), torch.empty(1, 2, dtype=torch.int32)
    last, ends = torch.tensor([[5.0, 5.0]]), int32(INT_MAX)
    assert indexer_topk_prefill(last * 2, int32(3), ends, 2, carry=kept, column=0) is None
    indexer_topk_prefill(last, int32(3), ends, 2, carry=kept, column=MAX_WIDTH - 2, out=out)
    assert out.tolist() == [[MAX_WIDTH - 5, MAX_WIDTH - 4]]


@pytest.mark.parametrize(("rows", "width"), [(0, 10), (0, 0), (2, 0)])
def test_nothing_to_select_from(rows: int, width: int) -> None:
    kept, ends = PrefillCarry(3, 4), torch.full((rows,), 5, dtype=torch.int32)
    got = in_slices(torch.empty(rows, width), torch.zeros_like(ends), ends, [0, width], kept)
    assert got.tolist() == [[-1] * 4] * rows


# ---------------------------------------------------------------- options of the last call


@pytest.mark.parametrize("path", ["auto", "radix_rounds"])
def test_every_argument_reaches_the_op(path: str, launched: list[Any]) -> None:
    names = ["row_starts", "row_ends", "out", "row_request", "offsets", "counts", "page_table", "slots"]
    tensors: dict[str, Any] = {name: torch.zeros(1, 1, dtype=torch.int32) for name in names}
    given_ = {**tensors, "logits": scores(), "k": np.int64(K), "column": np.int32(5), "page_size": 7}
    kept = PrefillCarry(1, 3)
    indexer_topk_prefill(**given_, carry=kept, pdl=True, path=path)
    wanted = PrefillSliceArguments(**given_, carry=kept.words, flags=FLAG_PDL)
    (got,) = launched
    assert type(got) is PrefillSliceArguments and len(got) == 14
    for name, value, like in zip(got._fields, got, wanted, strict=True):
        assert value is like or (not isinstance(like, Tensor) and value == like), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"carry": 3}, "carry: wanted a PrefillCarry, got int"),
        ({"carry": torch.zeros(6, 9)}, "carry: wanted a PrefillCarry, got Tensor"),
        ({"carry": PrefillCarry(6, 7)}, "carry: wanted shape [any, 9], got [6, 8]"),
        ({"carry": PrefillCarry(5, 8)}, "carry: wanted at least 6 rows, got 5"),
        ({"stats": torch.zeros(6, 8)}, "stats: wanted None beside a carry, got Tensor"),
        ({"column": 0.0}, "column: wanted an integer, got 0.0"),
        ({"carry": None, "column": 3}, "column: wanted a carry beside it, got None"),
        ({"path": "no_hint"}, "path: wanted one of 'auto', 'radix_rounds', got 'no_hint'"),
        ({"pdl": 1}, "pdl: wanted true or false, got 1"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    given_ = {"carry": PrefillCarry(6, K), **changes}
    with pytest.raises(ValueError, match=f"^{re.escape(f'gvr_topk.indexer_topk_prefill: {message}')}$"):
        indexer_topk_prefill(scores(), STARTS, ENDS, K, **given_)


# ---------------------------------------------------------------- the carry itself


@pytest.mark.parametrize(
    "rows", [2, [2, 0], (5,), int32(2, -1, 6, 9), torch.tensor([], dtype=torch.int8), None]
)
def test_rows_that_are_given_up(rows: Any) -> None:
    kept = PrefillCarry(ROWS, K)
    indexer_topk_prefill(scores(seed=1)[:, :30], STARTS, ENDS, K, carry=kept)
    emptied = set(range(ROWS)) if rows is None else set(torch.as_tensor(rows).flatten().tolist())
    words = kept.words.clone()
    kept.reset(rows)
    words[sorted(emptied & set(range(ROWS))), 0] = 0
    assert torch.equal(kept.words, words)
    fresh = torch.zeros(ROWS, dtype=torch.int32)
    got = in_slices(scores(), fresh, fresh + WIDTH, [0, 25, WIDTH], kept)
    wanted = in_windows(scores(), fresh, fresh + WIDTH, K)
    for row in sorted(emptied & set(range(ROWS))):
        assert got[row].tolist() == wanted[row], row


def test_a_row_that_there_is_not() -> None:
    """The others are those of `TopkState.reset`, which shares the check."""
    with pytest.raises(ValueError, match=r"^gvr_topk\.PrefillCarry\.reset: rows: wanted 0 to 5, got 6$"):
        PrefillCarry(ROWS, K).reset(6)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ((0, 8), "rows: wanted 1 to 67108864, got 0"),
        ((1, 0), "k: wanted 1 to 2097152, got 0"),
        ((1, 8, "moon"), "device: wanted a torch.device or the name of one, got 'moon'"),
    ],
)
def test_carries_that_cannot_be(given_: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^gvr_topk.PrefillCarry: {message}"):
        PrefillCarry(*given_)


def test_what_a_carry_says_of_itself() -> None:
    kept = PrefillCarry(3, 5)
    assert repr(kept) == "PrefillCarry(3, 5, 'cpu')" and (kept.rows, kept.k, kept.nbytes) == (3, 5, 144)
    assert kept.words.dtype == torch.int64 and not kept.words.any()
    with torch.device("meta"):
        assert PrefillCarry(3, 5).words.device.type == "cpu"


def test_any_content_is_safe() -> None:
    """The rows of a call come to an end, and those behind them stay as they were."""
    kept = PrefillCarry(ROWS + 2, K)
    garbage = torch.Generator().manual_seed(3)
    for bounds in ([0, WIDTH], [0, 20, 40, WIDTH]):
        kept.words.random_(generator=garbage)
        before = kept.words[ROWS:].clone()
        in_slices(scores(), STARTS, ENDS, bounds, kept)
        assert torch.equal(kept.words[ROWS:], before)
        again = in_slices(scores(), STARTS, ENDS, bounds, kept)
        assert again.tolist() == in_windows(scores(), STARTS, ENDS, K)


# ---------------------------------------------------------------- torch.library and torch.compile


@pytest.mark.parametrize("ends", [False, True])
def test_opcheck(ends: bool) -> None:
    kept = PrefillCarry(ROWS, K)
    call = PrefillSliceArguments(scores(), STARTS, ENDS, kept.words, K, 3)
    if ends:
        out, counts = torch.zeros(ROWS, K, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
        call = call._replace(out=out, counts=counts, offsets=STARTS)
    torch.library.opcheck(OP, tuple(call))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str) -> None:
    kept = PrefillCarry(ROWS, K)

    def step(logits: Tensor, starts: Tensor, ends: Tensor, out: Tensor) -> Tensor:
        indexer_topk_prefill(logits[:, :30] * 2, starts, ends + 0, K, carry=kept)
        indexer_topk_prefill(logits[:, 30:] * 2, starts, ends + 0, K, carry=kept, column=30, out=out)
        return out + 1

    compiled: Callable[..., Any] = torch.compile(step, fullgraph=True, backend=backend)
    for seed in range(2):
        got = compiled(scores(seed=seed), STARTS, ENDS, torch.empty(ROWS, K, dtype=torch.int32))
        assert (got - 1).tolist() == in_windows(scores(seed=seed), STARTS, ENDS, K)
