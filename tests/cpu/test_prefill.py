"""The prefill op on the CPU: windows, offsets, requests, page table, errors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows import ROWS, WIDTH, in_windows, int32, scores
from torch import Tensor

from gvr_topk import indexer_topk_prefill
from gvr_topk.arguments import PrefillArguments
from gvr_topk.constants import MAX_WIDTH, HintReason, StatsColumn
from gvr_topk.contract import DTYPES, row_windows

OP = torch.ops.gvr_topk.indexer_topk_prefill.default
K, REQUESTS = 8, 3
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


STARTS, ENDS = int32(0, 3, 60, 20, -5, 40), int32(WIDTH, 50, WIDTH, 29, 7, 40)
REQUEST = int32(0, 2, 1, 1, 0, 2)
TABLE = torch.arange(12, dtype=torch.int32).reshape(REQUESTS, 4)
PAGE = 16
OFFSETS = int32(100, 0, -1000)


def agree(logits: Tensor, starts: Tensor, ends: Tensor, k: int, **options: Any) -> Tensor:
    """Call the op, which has to give what is expected."""
    got = indexer_topk_prefill(logits, starts, ends, k, **options)
    assert got.dtype == torch.int32
    assert got.tolist() == in_windows(logits, starts, ends, k)
    return got


def valid(**changes: Any) -> dict[str, Any]:
    """Arguments of one valid call with every optional one, some of them replaced.

    Without a page table there is no page size.
    """
    arguments = {
        "logits": scores(),
        "row_starts": STARTS,
        "row_ends": ENDS,
        "k": K,
        "counts": torch.zeros(ROWS, dtype=torch.int32),
        "row_request": REQUEST,
        "offsets": OFFSETS,
        "page_table": TABLE,
        "page_size": 0 if changes.get("page_table", TABLE) is None else PAGE,
        "slots": torch.zeros(ROWS, K, dtype=torch.int32),
        "stats": torch.zeros(ROWS, 8, dtype=torch.int32),
    }
    return {**arguments, **changes}


def call(**changes: Any) -> Tensor:
    return indexer_topk_prefill(**valid(**changes))


def described(**changes: Any) -> PrefillArguments:
    """The same call as the op sees it."""
    return PrefillArguments(**{"out": torch.zeros(ROWS, K, dtype=torch.int32), **valid(**changes)})


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("start", "end", "wanted"),
    [
        (0, 4, (0, 4)),
        (-9, 4, (0, 4)),
        (2, 99, (2, 8)),
        (5, 5, (5, 0)),
        (6, 5, (6, 0)),
        (99, 120, (99, 0)),
        (INT_MIN, INT_MIN, (0, 0)),
        (INT_MAX, INT_MAX, (INT_MAX, 0)),
        (INT_MAX, INT_MIN, (INT_MAX, 0)),
        (INT_MIN, INT_MAX, (0, 10)),
    ],
)
def test_a_window_is_clamped_to_the_row(start: int, end: int, wanted: tuple[int, int]) -> None:
    starts, lengths = row_windows(int32(start), int32(end), 10)
    assert (int(starts), int(lengths)) == wanted
    agree(scores(1, 10), int32(start), int32(end), 3)


def test_rows_of_scores_may_overlap() -> None:
    starts, ends = STARTS, ENDS
    agree(scores(1).expand(ROWS, WIDTH), starts, ends, K)
    agree(scores(1, width=WIDTH + ROWS - 1)[0].as_strided((ROWS, WIDTH), (1, 1)), starts, ends, K)


@pytest.mark.parametrize("k", [1, MAX_WIDTH])
def test_the_fewest_and_the_most_items(k: int) -> None:
    got = indexer_topk_prefill(scores(1), int32(3), int32(60), k)
    assert got.shape == (1, k) and int((got >= 0).sum()) == min(k, 57)


def test_the_widest_row() -> None:
    logits = torch.zeros(1, MAX_WIDTH)
    logits[0, -1] = 1.0
    got = indexer_topk_prefill(logits, int32(5), int32(MAX_WIDTH), 2)
    assert got.tolist() == [[0, MAX_WIDTH - 6]]


@pytest.mark.parametrize(("rows", "width"), [(0, 10), (0, 0), (2, 0)])
def test_nothing_to_select_from(rows: int, width: int) -> None:
    ends = torch.full((rows,), 5, dtype=torch.int32)
    got = indexer_topk_prefill(torch.empty(rows, width), torch.zeros_like(ends), ends, 4)
    assert got.tolist() == [[-1] * 4] * rows and got.dtype == torch.int32


def test_out_is_written_in_place_and_no_further_than_k() -> None:
    out, slots = (torch.full((ROWS, K + 3), -7, dtype=torch.int32) for _ in range(2))
    assert call(out=out, slots=slots) is out
    assert (out[:, K:] == -7).all() and (out[:, :K] != -7).all()
    assert (slots[:, K:] == -7).all() and (slots[:, :K] != -7).all()


# ---------------------------------------------------------------- offsets, requests and the page table


def shifted(positions: list[list[int]], offsets: list[int]) -> list[list[int]]:
    """Positions with an offset of their row, as Python's integers add."""
    return [
        [p + offset if p >= 0 and INT_MIN <= p + offset <= INT_MAX else -1 for p in row]
        for row, offset in zip(positions, offsets, strict=True)
    ]


def test_offsets_at_the_ends_of_int32() -> None:
    starts, ends = torch.zeros(3, dtype=torch.int32), int32(3, 3, 2)
    got = indexer_topk_prefill(scores(3), starts, ends, 3, offsets=int32(INT_MAX - 1, INT_MIN, -1))
    assert got.tolist() == [[INT_MAX - 1, INT_MAX, -1], [INT_MIN, INT_MIN + 1, INT_MIN + 2], [-1, 0, -1]]


@pytest.mark.parametrize("tables", [{"offsets": int32()}, {"page_table": TABLE[:0], "page_size": PAGE}])
def test_without_requests_every_row_is_padding(tables: dict[str, Any]) -> None:
    counts = torch.full((ROWS,), 77, dtype=torch.int32)
    got = indexer_topk_prefill(scores(), STARTS, ENDS, K, row_request=REQUEST, counts=counts, **tables)
    assert (got == -1).all() and (counts == 0).all()


# ---------------------------------------------------------------- statistics and flags


def test_statistics_say_that_the_cpu_predicts_nothing() -> None:
    stats = torch.full((ROWS, 8), 77, dtype=torch.int32)
    call(stats=stats)
    reasons = [HintReason(reason) for reason in stats[:, StatsColumn.REASON].tolist()]
    first, short = HintReason.FIRST_STEP, HintReason.SHORT_ROW
    assert reasons == [first, first, short, first, short, short]
    assert (stats[:, StatsColumn.HITS] == -1).all()
    others = [column for column in StatsColumn if column not in (StatsColumn.REASON, StatsColumn.HITS)]
    assert (stats[:, others] == 0).all()


def test_statistics_of_rounds_alone() -> None:
    stats = torch.full((ROWS, 8), 77, dtype=torch.int32)
    call(stats=stats, path="radix_rounds")
    assert (stats[:, StatsColumn.REASON] == HintReason.DISABLED).all()


# ---------------------------------------------------------------- torch.library and torch.compile


@pytest.mark.parametrize(
    "absent",
    [
        (),
        ("page_table", "slots"),
        ("offsets", "slots"),
        ("counts", "stats"),
        ("row_request", "offsets", "page_table", "slots"),
        ("row_request", "offsets", "counts", "page_table", "slots", "stats"),
    ],
    ids=lambda names: "all" if not names else "no " + ",".join(names),
)
def test_opcheck(absent: tuple[str, ...]) -> None:
    torch.library.opcheck(OP, tuple(described(**dict.fromkeys(absent))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_dtypes_and_strides(dtype: torch.dtype) -> None:
    changes = {
        "logits": scores(width=2 * WIDTH, dtype=dtype)[:, :WIDTH],
        "out": torch.zeros(ROWS, K + 2, dtype=torch.int32),
    }
    torch.library.opcheck(OP, tuple(described(**changes)))


def chunk(logits: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    chosen = indexer_topk_prefill(logits * 2, starts + 0, ends + 1, K, offsets=starts)
    return chosen, logits.gather(1, chosen.long().clamp(min=0)).sum(1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str) -> None:
    compiled: Callable[..., Any] = torch.compile(chunk, fullgraph=True, backend=backend)
    for seed in range(2):
        logits, starts, ends = scores(seed=seed), STARTS.clamp(min=0) + seed, ENDS - seed
        got, wanted = compiled(logits, starts, ends), chunk(logits, starts, ends)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert got[0].tolist() == shifted(in_windows(logits, starts, ends + 1, K), starts.tolist())
