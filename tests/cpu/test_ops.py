"""The op on the CPU: result, state written back, statistics, page table, errors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gvr_topk
from gvr_topk import ops
from gvr_topk.contract import (
    CLUSTER_SIZES,
    DTYPES,
    MAX_ROWS,
    MAX_WIDTH,
    PATHS,
    PLACES,
    STATE_FLOATS,
    STATS_COLUMNS,
    row_lengths,
)
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.gate import Path
from gvr_topk.library import LibraryError, LibraryStatus

OP = torch.ops.gvr_topk.indexer_topk_decode.default
ROWS, WIDTH, K, NEXT_N = 6, 64, 8, 2
REQUESTS = ROWS // NEXT_N
PATH_NAMES = [path.name.lower() for path in Path]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scores(rows: int = ROWS, width: int = WIDTH, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with many ties, at the k-th place too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, (rows, width), generator=generator).to(dtype)


def state(slots: int, first: float = 0.0) -> Tensor:
    """Slots that all hold this number first, and zeros."""
    made = torch.zeros(slots, STATE_FLOATS)
    made[:, 0] = first
    return made


def call(**changes: Any) -> Tensor:
    """One valid call with every optional argument, some of them replaced."""
    arguments: dict[str, Any] = {
        "logits": scores(),
        "seq_lens": int32(WIDTH, 30, 9),
        "k": K,
        "next_n": NEXT_N,
        "prior": torch.zeros(4, K, dtype=torch.int32),
        "row_slot": int32(0, 0, 3, 3, 1, 1),
        "guess_state": state(4),
        "stats": torch.zeros(ROWS, 8, dtype=torch.int32),
        "page_table": torch.arange(12, dtype=torch.int32).reshape(3, 4),
        "page_size": 16,
    }
    return gvr_topk.indexer_topk_decode(**{**arguments, **changes})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_result_is_the_contracts(dtype: torch.dtype, next_n: int) -> None:
    logits = scores(dtype=dtype)
    logits[:, ::7] = float("nan")
    logits[:, 1::5] = 0.25  # ties
    seq_lens = int32(64, 9, 2, 0, 30, 5)[: ROWS // next_n]
    got = gvr_topk.indexer_topk_decode(logits, seq_lens, K, next_n=next_n)
    assert torch.equal(got, sorted_topk(logits, row_lengths(seq_lens, ROWS, next_n), K))


@pytest.mark.parametrize("path", PATH_NAMES)
def test_every_path_is_taken_on_a_cpu_too(path: str) -> None:
    assert torch.equal(call(path=path), call())


def test_lengths_above_the_width_mean_the_width() -> None:
    logits = scores()
    got = gvr_topk.indexer_topk_decode(logits, torch.full((ROWS,), 10_000, dtype=torch.int32), K)
    assert torch.equal(got, sorted_topk(logits, torch.full((ROWS,), WIDTH), K))


def test_hinted_positions_past_the_width_do_not_count() -> None:
    prior, guess = torch.full((1, K), WIDTH, dtype=torch.int32), state(1)
    prior[0, 0] = scores(1).argmax()
    gvr_topk.indexer_topk_decode(scores(1), int32(10_000), K, prior=prior, guess_state=guess)
    assert guess.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_rows_may_lie_apart() -> None:
    wide = scores(width=3 * WIDTH)
    got = gvr_topk.indexer_topk_decode(
        wide[:, 5 : 5 + WIDTH], torch.full((ROWS,), WIDTH, dtype=torch.int32), K
    )
    assert torch.equal(got, sorted_topk(wide[:, 5 : 5 + WIDTH].clone(), torch.full((ROWS,), WIDTH), K))


def test_out_is_written_in_place_and_no_further_than_k() -> None:
    out = torch.full((ROWS, K + 3), -7, dtype=torch.int32)
    got = call(out=out, page_table=None)
    assert got is out
    assert (out[:, K:] == -7).all() and (out[:, :K] != -7).all()


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("length", [-(2**31), -(2**31) + 1, -1, 0])
def test_rows_of_a_length_far_below_zero_are_empty(length: int, next_n: int) -> None:
    lengths = torch.full((ROWS // next_n,), length, dtype=torch.int32)
    assert (gvr_topk.indexer_topk_decode(scores(), lengths, K, next_n=next_n) == -1).all()


def test_many_more_items_than_columns() -> None:
    k = 100 * WIDTH
    got = gvr_topk.indexer_topk_decode(scores(1), int32(WIDTH - 1), k)
    assert got[0, : WIDTH - 1].tolist() == list(range(WIDTH - 1))
    assert got.shape == (1, k) and (got[0, WIDTH - 1 :] == -1).all()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_integers(kind: Callable[[int], Any]) -> None:
    changes = {"k": kind(K), "next_n": kind(NEXT_N), "page_size": kind(16), "prior_offset": kind(1)}
    assert torch.equal(call(**changes, max_ctas=kind(4), ctas_per_row=kind(2)), call(prior_offset=1))


def test_rows_of_scores_may_overlap() -> None:
    row = scores(1)
    lengths = torch.full((ROWS,), WIDTH, dtype=torch.int32)
    got = gvr_topk.indexer_topk_decode(row.expand(ROWS, WIDTH), lengths, K)
    assert torch.equal(got, sorted_topk(row, lengths[:1], K).expand(ROWS, K))
    windows = scores(1, width=WIDTH + ROWS - 1)[0].as_strided((ROWS, WIDTH), (1, 1))
    got = gvr_topk.indexer_topk_decode(windows, lengths, K)
    assert torch.equal(got, sorted_topk(windows.clone(), lengths, K))


@pytest.mark.parametrize("cap", [0, *CLUSTER_SIZES])
def test_the_cap_changes_no_result(cap: int) -> None:
    assert torch.equal(call(max_ctas=cap), call())


def test_the_widest_row() -> None:
    logits = torch.zeros(1, MAX_WIDTH)
    logits[0, -1] = 1.0
    assert gvr_topk.indexer_topk_decode(logits, int32(MAX_WIDTH), 2).tolist() == [[0, MAX_WIDTH - 1]]


def test_no_rows() -> None:
    got = gvr_topk.indexer_topk_decode(torch.empty(0, 10), int32(), 4)
    assert got.shape == (0, 4) and got.dtype == torch.int32


# ---------------------------------------------------------------- hint in, hint out


@settings(max_examples=50)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4 * K, max_size=4 * K),
    st.lists(st.floats(width=32), min_size=STATE_FLOATS, max_size=STATE_FLOATS),
    st.integers(-70, 70),
)
def test_no_hint_and_no_state_changes_the_result(values: list[int], slot: list[float], offset: int) -> None:
    prior = int32(*values).reshape(4, K)
    guess = torch.tensor(slot, dtype=torch.float32).repeat(4, 1)
    got = call(prior=prior, guess_state=guess.clone(), prior_offset=offset)
    assert torch.equal(got, call(prior=None, row_slot=None, guess_state=None))
    assert torch.equal(got, call(prior=None, guess_state=guess, prior_offset=offset))


def test_the_last_row_of_a_request_writes_the_next_hint() -> None:
    prior = torch.full((4, K), 5, dtype=torch.int32)
    got = call(prior=prior, page_table=None)
    assert torch.equal(prior[0], got[1]) and torch.equal(prior[3], got[3]) and torch.equal(prior[1], got[5])
    assert (prior[2] == 5).all()  # nobody's slot
    assert not torch.equal(got[0], got[1])  # or the test could not tell the rows apart


def test_without_row_slot_each_request_has_its_own() -> None:
    prior = torch.full((4, K), 5, dtype=torch.int32)
    got = call(prior=prior, row_slot=None, page_table=None)
    assert torch.equal(prior[:REQUESTS], got[1::2])
    assert (prior[REQUESTS:] == 5).all()


@pytest.mark.parametrize("slot", [-1, -(2**31), 4, 2**31 - 1])
def test_padding_rows_neither_read_nor_write(slot: int) -> None:
    prior = torch.full((4, K), 5, dtype=torch.int32)
    guess = state(4, 0.25)
    stats = torch.zeros(ROWS, 8, dtype=torch.int32)
    got = call(
        prior=prior, guess_state=guess, stats=stats, row_slot=torch.full((ROWS,), slot, dtype=torch.int32)
    )
    assert (prior == 5).all() and torch.equal(guess, state(4, 0.25))
    assert (stats[:, STATS_COLUMNS.index("hits")] == -1).all()
    assert torch.equal(got, call())


@pytest.mark.parametrize("row_slot", [None, int32(0, 0, 3, 3, -1, 7)])
def test_state_without_prior(row_slot: Tensor | None) -> None:
    """Nothing is known of hinted positions, so nothing is counted."""
    guess, stats = state(4, 0.25), torch.zeros(ROWS, 8, dtype=torch.int32)
    got = call(prior=None, row_slot=row_slot, guess_state=guess, stats=stats)
    assert torch.equal(got, call())
    assert (stats[:, STATS_COLUMNS.index("hits")] == -1).all()


def test_a_new_state_knows_nothing() -> None:
    made = gvr_topk.new_guess_state(3)
    assert made.shape == (3, STATE_FLOATS) and made.dtype == torch.float32
    assert made.is_contiguous() and (made == -1).all()
    assert gvr_topk.new_guess_state(3, "meta").device.type == "meta"


def test_short_rows_leave_a_padded_hint() -> None:
    prior = torch.full((1, K), 5, dtype=torch.int32)
    gvr_topk.indexer_topk_decode(scores(1), int32(3), K, prior=prior)
    assert prior.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("offset", [0, 1, -2])
def test_hits_and_guess_state_count_the_hinted_values_that_are_large_enough(offset: int) -> None:
    logits = scores(1, seed=3)
    length = 50
    # Inside, twice the same, and outside at both ends, before and after the offset.
    hint = [0, 3, 3, 47, 49, 60, -1, 12]
    prior, guess = int32(*hint).reshape(1, K), gvr_topk.new_guess_state(1)
    stats = torch.zeros(1, 8, dtype=torch.int32)
    got = gvr_topk.indexer_topk_decode(
        logits, int32(length), K, prior=prior, guess_state=guess, stats=stats, prior_offset=offset
    )
    kth = min(logits[0, i].item() for i in got[0].tolist())
    hinted = [h + offset for h in hint if h >= 0 and 0 <= h + offset < length]
    hits = sum(logits[0, h].item() >= kth for h in hinted)
    assert stats[0, STATS_COLUMNS.index("hits")] == hits
    assert guess[0].tolist() == pytest.approx([hits / len(hinted), 0, 0, 0])


def test_padding_of_the_hint_stays_padding_under_an_offset() -> None:
    """-1 plus 1 is not position 0, even where that is the largest score of the row."""
    logits = torch.zeros(1, 32)
    logits[0, :3] = torch.tensor([9.0, 8.0, 7.0])
    prior, guess = int32(-1, -1, 0).reshape(1, 3), state(1)
    stats = torch.zeros(1, 8, dtype=torch.int32)
    gvr_topk.indexer_topk_decode(
        logits, int32(32), 3, prior=prior, guess_state=guess, stats=stats, prior_offset=1
    )
    assert stats[0, STATS_COLUMNS.index("hits")] == 1  # position 1, from 0 + 1
    assert torch.equal(guess, state(1, 1.0))


def test_the_last_row_of_a_request_alone_writes_the_state() -> None:
    """The rows of a request hit differently; a state of the first one would be 1."""
    logits = torch.zeros(2, 32)
    logits[0, 4:7], logits[1, 20:23] = 1.0, 1.0
    prior, guess = int32(4, 5, 6).reshape(1, 3), gvr_topk.new_guess_state(1)
    stats = torch.zeros(2, 8, dtype=torch.int32)
    gvr_topk.indexer_topk_decode(logits, int32(32), 3, next_n=2, prior=prior, guess_state=guess, stats=stats)
    assert stats[:, STATS_COLUMNS.index("hits")].tolist() == [3, 0]
    assert torch.equal(guess, state(1, 0.0))


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, 2),
        ({"pdl": True}, 3),
        ({"quantile_guess": False}, 0),
        ({"pdl": True, "quantile_guess": False}, 1),
    ],
)
def test_flags_are_those_of_the_header(
    options: dict[str, bool], flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ops.torch.ops.gvr_topk, "indexer_topk_decode", lambda *given: seen.append(given[15]))
    gvr_topk.indexer_topk_decode(scores(1), int32(WIDTH), K, **options)  # type: ignore[arg-type]
    assert seen == [flags]


def test_a_row_without_a_usable_hint_makes_the_state_unknown() -> None:
    prior, guess = torch.full((1, K), -1, dtype=torch.int32), state(1, 0.5)
    gvr_topk.indexer_topk_decode(scores(1), int32(WIDTH), K, prior=prior, guess_state=guess)
    assert guess[0, 0] == -1


@pytest.mark.parametrize("slotted", [False, True])
def test_the_state_alone_is_kept_by_slot_and_changes_no_result(slotted: bool) -> None:
    """The last row of each request leaves the z-score of its k-th value, from the middle of `PLACES` on.

    That is the CPU's; kernels leave more.
    """
    lengths, slots = int32(WIDTH, 30, 9), [2, 5, 0] if slotted else [0, 1, 2]
    row_slot = int32(*(slot for slot in slots for _ in range(NEXT_N))) if slotted else None
    guess = gvr_topk.new_guess_state(6)
    logits = scores(seed=4) + torch.linspace(0, 0.5, WIDTH)
    arguments = {"logits": logits, "seq_lens": lengths, "stats": None}
    plain = call(**arguments, prior=None, row_slot=None, guess_state=None)
    for _ in range(2):  # a step that finds a place selects the same
        got = call(**arguments, prior=None, row_slot=row_slot, guess_state=guess)
        assert torch.equal(got, plain)
    expected = gvr_topk.new_guess_state(6)
    for request, slot in enumerate(slots):
        row, length = NEXT_N * request + NEXT_N - 1, int(lengths[request])
        visible = logits[row, :length].double()
        kth = visible.sort(descending=True).values[K - 1]
        place = float(sum(PLACES) / 2 + (kth - visible.mean()) / visible.std(correction=0))
        expected[slot] = torch.tensor([place, 0, 0, 0])
    assert torch.allclose(guess, expected)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_the_state_alone_knows_no_place_in_a_row_without_spread(value: float) -> None:
    guess = state(1, 64.0)
    call(
        logits=torch.full((1, WIDTH), value),
        seq_lens=int32(WIDTH),
        next_n=1,
        prior=None,
        row_slot=None,
        guess_state=guess,
        stats=None,
        page_table=None,
    )
    assert torch.equal(guess, state(1, -1.0))


def test_a_row_without_a_slot_leaves_no_state() -> None:
    guess = gvr_topk.new_guess_state(4)
    call(prior=None, guess_state=guess, row_slot=int32(-1, -1, 4, 4, 1, 1), seq_lens=int32(60, 60, 60))
    assert guess[1, 0] > 48 and (guess[[0, 2, 3]] == -1).all()


def test_a_repeated_step_hits_with_its_whole_hint() -> None:
    prior, guess = torch.full((REQUESTS, K), -1, dtype=torch.int32), state(REQUESTS)
    stats = torch.zeros(REQUESTS, 8, dtype=torch.int32)
    logits = scores(REQUESTS)
    for _ in range(2):
        gvr_topk.indexer_topk_decode(
            logits,
            torch.full((REQUESTS,), WIDTH, dtype=torch.int32),
            K,
            prior=prior,
            guess_state=guess,
            stats=stats,
        )
    assert (stats[:, STATS_COLUMNS.index("hits")] == K).all() and torch.equal(guess, state(REQUESTS, 1.0))


def test_statistics_say_which_path() -> None:
    stats = torch.full((3, 8), 77, dtype=torch.int32)
    gvr_topk.indexer_topk_decode(scores(3), int32(K + 1, K, 0), K, stats=stats)
    assert [PATHS[p] for p in stats[:, 0].tolist()] == ["cpu", "short", "short"]
    assert stats[:, STATS_COLUMNS.index("hits")].tolist() == [-1, -1, -1]
    assert (stats != 77).all()


# ---------------------------------------------------------------- page table


@given(st.integers(1, 20), st.integers(1, 8), st.randoms(use_true_random=False))
def test_page_table_translates_what_comes_out_and_not_the_hint(
    page_size: int, pages: int, random: Any
) -> None:
    table = [[random.randrange(1000) for _ in range(pages)] for _ in range(REQUESTS)]
    prior = torch.zeros(4, K, dtype=torch.int32)
    plain_prior = prior.clone()
    lengths = int32(WIDTH, 30, 5)  # the last one is padded with -1, which has no page
    got = call(
        page_table=torch.tensor(table, dtype=torch.int32), page_size=page_size, prior=prior, seq_lens=lengths
    )
    plain = call(page_table=None, prior=plain_prior, seq_lens=lengths)
    assert torch.equal(prior, plain_prior)
    for row in range(ROWS):
        for slot, position in zip(got[row].tolist(), plain[row].tolist(), strict=True):
            page = position // page_size
            known = position >= 0 and page < pages
            wanted = table[row // NEXT_N][page] * page_size + position % page_size if known else -1
            assert slot == wanted


def paged(table: Tensor, page_size: int, positions: list[int]) -> list[int]:
    """Slots that the op gives for these positions, the highest scores of one row."""
    logits = torch.zeros(1, 64)
    logits[0, positions] = 1
    prior = torch.zeros(1, len(positions), dtype=torch.int32)
    got = gvr_topk.indexer_topk_decode(
        logits, int32(64), len(positions), page_table=table, page_size=page_size, prior=prior
    )
    assert prior.tolist() == [positions]  # the hint keeps positions
    return [int(slot) for slot in got[0]]


def test_a_page_table_without_columns_holds_no_page() -> None:
    assert paged(torch.zeros(1, 0, dtype=torch.int32), 16, [0, 5, 63]) == [-1, -1, -1]


def test_pages_with_negative_numbers_are_not_there() -> None:
    table = int32(3, -1, -(2**31), 0).reshape(1, 4)
    assert paged(table, 16, [0, 15, 16, 31, 32, 47, 48, 63]) == [48, 63, -1, -1, -1, -1, 0, 15]


def test_slots_that_int32_cannot_hold_are_minus_one() -> None:
    # The last slot of 32 bits, 2**31 - 1, is page 2**27 - 1 of 16 positions, its last one.
    table = int32(2**27 - 1, 2**27, 2**31 - 1, 1).reshape(1, 4)
    assert paged(table, 16, [0, 15, 16, 31, 32, 48]) == [2**31 - 16, 2**31 - 1, -1, -1, -1, 16]
    # In 32 bits these would wrap to slots that look right.
    assert paged(int32(2**16, 5).reshape(1, 2), 2**16, [0, 1]) == [-1, -1]


@pytest.mark.parametrize("page_size", [64, 2**30, 2**31 - 1])
def test_large_pages(page_size: int) -> None:
    assert paged(int32(0).reshape(1, 1), page_size, [0, 7, 63]) == [0, 7, 63]
    assert paged(int32(2).reshape(1, 1), page_size, [0, 63]) == (
        [2 * page_size, 2 * page_size + 63] if page_size == 64 else [-1, -1]
    )


# ---------------------------------------------------------------- errors

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logits": scores().double()}, "logits: want dtype float32, bfloat16 or float16, got torch.float64"),
    ({"logits": torch.zeros(8)}, r"logits: want shape \[rows, width\], got \[8\]"),
    ({"logits": torch.zeros(WIDTH, ROWS).T}, "logits: want inner stride 1, got 6"),
    ({"logits": torch.zeros(1).expand(ROWS, WIDTH)}, "logits: want inner stride 1, got 0"),
    (
        {"logits": torch.zeros(1, MAX_WIDTH + 1).expand(6, -1)},
        f"logits: want at most {MAX_WIDTH} columns, got",
    ),
    (
        {"logits": torch.zeros(1, 1).expand(MAX_ROWS + 2, 1)},
        f"logits: want at most {MAX_ROWS} rows, got {MAX_ROWS + 2}",
    ),
    ({"logits": torch.zeros(5, WIDTH)}, "logits: want a multiple of next_n = 2 rows, got 5"),
    ({"k": 0}, f"k: want 1 to {MAX_WIDTH}, got 0"),
    ({"k": -1}, "k: want 1 to"),
    ({"k": 2.0}, "k: want an integer, got 2.0"),
    ({"k": np.float32(2)}, "k: want an integer, got "),
    ({"k": "8"}, "k: want an integer, got '8'"),
    ({"k": torch.tensor(8)}, r"k: want an integer, got tensor\(8\)"),
    ({"next_n": 2.0}, "next_n: want an integer, got 2.0"),
    ({"page_size": 16.0}, "page_size: want an integer, got 16.0"),
    ({"prior_offset": 0.5}, "prior_offset: want an integer, got 0.5"),
    ({"max_ctas": 8.0}, "max_ctas: want an integer, got 8.0"),
    ({"k": MAX_WIDTH + 1, "out": torch.zeros(ROWS, 1, dtype=torch.int32)}, f"k: want 1 to {MAX_WIDTH}, got"),
    ({"next_n": 0}, "next_n: want 1 to 1024, got 0"),
    ({"next_n": 1025}, "next_n: want 1 to 1024, got 1025"),
    ({"seq_lens": int32(1, 2)}, r"seq_lens: want shape \[3\], got \[2\]"),
    ({"seq_lens": int32(1, 2, 3).long()}, "seq_lens: want dtype torch.int32, got torch.int64"),
    ({"seq_lens": int32(1, 2, 3).to("meta")}, "seq_lens: want a tensor on cpu, got meta"),
    ({"seq_lens": int32(*range(6))[::2]}, "seq_lens: want inner stride 1, got 2"),
    ({"out": torch.zeros(ROWS, K)}, "out: want dtype torch.int32, got torch.float32"),
    ({"out": torch.zeros(ROWS, K - 1, dtype=torch.int32)}, r"out: want at least k = 8 columns, got \[6, 7\]"),
    ({"out": torch.zeros(ROWS - 1, K, dtype=torch.int32)}, r"out: want shape \[6, any\], got \[5, 8\]"),
    (
        {"out": torch.zeros(ROWS * K, dtype=torch.int32).as_strided((ROWS, K), (K - 1, 1))},
        "out: want rows that do not overlap, at least 8 elements apart, got 7",
    ),
    (
        {"out": torch.zeros(1, K, dtype=torch.int32).expand(ROWS, K)},
        "out: want rows that do not overlap, at least 8 elements apart, got 0",
    ),
    (
        {"prior": torch.zeros(1, K, dtype=torch.int32).expand(4, K)},
        "prior: want rows that do not overlap, at least 8 elements apart, got 0",
    ),
    (
        {"prior": torch.zeros(4 * K, dtype=torch.int32).as_strided((4, K), (K - 1, 1))},
        "prior: want rows that do not overlap, at least 8 elements apart, got 7",
    ),
    ({"prior": torch.zeros(4, K - 1, dtype=torch.int32)}, r"prior: want shape \[any, 8\], got \[4, 7\]"),
    ({"prior": torch.zeros(4, K)}, "prior: want dtype torch.int32, got torch.float32"),
    (
        {"prior": torch.zeros(2, K, dtype=torch.int32), "row_slot": None, "guess_state": None},
        "prior: want at least 3 slots without row_slot, got 2",
    ),
    (
        {"prior": None, "guess_state": None},
        "row_slot: want a prior or a guess_state beside it, got None",
    ),
    (
        {"prior": None, "row_slot": None, "guess_state": state(2)},
        "guess_state: want at least 3 slots without row_slot, got 2",
    ),
    ({"row_slot": int32(0, 1, 2)}, r"row_slot: want shape \[6\], got \[3\]"),
    ({"guess_state": state(3)}, r"guess_state: want shape \[4, 4\], got \[3, 4\]"),
    ({"guess_state": torch.zeros(4)}, r"guess_state: want shape \[4, 4\], got \[4\]"),
    ({"guess_state": torch.zeros(4, 3)}, r"guess_state: want shape \[4, 4\], got \[4, 3\]"),
    (
        {"prior": None, "guess_state": torch.zeros(9, 5)},
        r"guess_state: want shape \[any, 4\], got \[9, 5\]",
    ),
    ({"guess_state": torch.zeros(4, 8)[:, :4]}, r"guess_state: want contiguous rows, got \(8, 1\)"),
    ({"guess_state": torch.zeros(1, 4).expand(4, 4)}, r"guess_state: want contiguous rows, got \(0, 1\)"),
    ({"guess_state": torch.zeros(4, 4).T}, "guess_state: want inner stride 1, got 4"),
    ({"guess_state": state(4).to("meta")}, "guess_state: want a tensor on cpu, got meta"),
    ({"guess_state": state(4).double()}, "guess_state: want dtype torch.float32, got torch.float64"),
    ({"stats": torch.zeros(ROWS, 7, dtype=torch.int32)}, r"stats: want shape \[6, 8\], got \[6, 7\]"),
    ({"stats": torch.zeros(ROWS, 9, dtype=torch.int32)[:, :8]}, "stats: want contiguous rows, got"),
    ({"stats": torch.zeros(1, 8, dtype=torch.int32).expand(ROWS, 8)}, "stats: want contiguous rows, got"),
    ({"phase_clocks": torch.zeros(ROWS, 8)}, "phase_clocks: want dtype torch.int64, got torch.float32"),
    (
        {"phase_clocks": torch.zeros(1, 8, dtype=torch.int64).expand(ROWS, 8)},
        "phase_clocks: want contiguous rows, got",
    ),
    ({"page_table": int32(1, 2, 3)}, r"page_table: want shape \[3, any\], got \[3\]"),
    (
        {"page_table": torch.zeros(2, 4, dtype=torch.int32)},
        r"page_table: want shape \[3, any\], got \[2, 4\]",
    ),
    ({"page_size": 0}, "page_size: want at least 1 with a page_table, got 0"),
    ({"page_size": 2**31}, "page_size: want at most 2147483647, got 2147483648"),
    ({"max_ctas": 3}, "max_ctas: want 0, 1, 2, 4, 8 or 16, got 3"),
    ({"max_ctas": -8}, "max_ctas: want 0, 1, 2, 4, 8 or 16, got -8"),
    ({"max_ctas": 32}, "max_ctas: want 0, 1, 2, 4, 8 or 16, got 32"),
    ({"max_ctas": 4, "ctas_per_row": 8}, "ctas_per_row: want at most max_ctas = 4, got 8"),
    ({"prior_offset": MAX_WIDTH + 1}, r"prior_offset: want \|offset\| <= "),
    ({"prior_offset": -MAX_WIDTH - 1}, r"prior_offset: want \|offset\| <= "),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:50] for _, message in WRONG])
def test_error_names_the_argument_what_was_wanted_and_what_was_got(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"^gvr_topk\.indexer_topk_decode: " + message):
        call(**change)


def test_unknown_path_is_an_error_on_the_cpu_too() -> None:
    with pytest.raises(ValueError, match=r"path: want one of .* got 'fast'"):
        call(path="fast")


def test_the_op_itself_checks_too() -> None:
    with pytest.raises(ValueError, match="seq_lens: want dtype"):
        OP(*arguments()[:1], int32(1, 2, 3).long(), *arguments()[2:], k=K, next_n=NEXT_N)


def test_cuda_tensors_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_LIBRARY", LibraryStatus(False, None, "built without it"))
    with FakeTensorMode():
        logits = torch.empty(1, 8, device="cuda")
        lengths = torch.empty(1, dtype=torch.int32, device="cuda")
    with pytest.raises(
        LibraryError, match=r"^gvr_topk\.indexer_topk_decode: CUDA library: built without it$"
    ):
        gvr_topk.indexer_topk_decode(logits, lengths, 2)


# ---------------------------------------------------------------- torch.library and torch.compile


def arguments(**changes: Tensor | None) -> list[Tensor | None]:
    """The op's tensors in the schema's order, some of them replaced."""
    tensors: dict[str, Tensor | None] = {
        "logits": scores(),
        "seq_lens": int32(WIDTH, 30, 9),
        "indices": torch.zeros(ROWS, K, dtype=torch.int32),
        "prior": torch.zeros(4, K, dtype=torch.int32),
        "row_slot": int32(0, 0, 3, 3, 1, -1),
        "guess_state": state(4),
        "stats": torch.zeros(ROWS, 8, dtype=torch.int32),
        "page_table": torch.arange(12, dtype=torch.int32).reshape(3, 4),
        "phase_clocks": None,
    }
    assert list(tensors) == [a.name for a in OP._schema.arguments][: len(tensors)]
    return list({**tensors, **changes}.values())


@pytest.mark.parametrize(
    "absent",
    [
        (),
        ("page_table",),
        ("stats", "page_table"),
        ("guess_state", "stats"),
        ("row_slot", "guess_state"),
        ("prior",),
        ("prior", "row_slot"),
        ("prior", "row_slot", "guess_state"),
        ("prior", "row_slot", "guess_state", "stats", "page_table"),
    ],
    ids=lambda names: "all" if not names else "no " + ",".join(names),
)
def test_opcheck(absent: tuple[str, ...]) -> None:
    torch.library.opcheck(
        OP, tuple(arguments(**dict.fromkeys(absent))), {"k": K, "next_n": NEXT_N, "page_size": 16}
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_dtypes_and_strides(dtype: torch.dtype) -> None:
    changes = {
        "logits": scores(width=2 * WIDTH, dtype=dtype)[:, :WIDTH],
        "indices": torch.zeros(ROWS, K + 2, dtype=torch.int32),
    }
    torch.library.opcheck(OP, tuple(arguments(**changes)), {"k": K, "next_n": NEXT_N, "page_size": 16})


def test_the_schema_declares_every_write() -> None:
    written = {a.name for a in OP._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"indices", "prior", "guess_state", "stats", "phase_clocks"}


def decode_step(logits: Tensor, seq_lens: Tensor, prior: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    chosen = gvr_topk.indexer_topk_decode(logits * 2, seq_lens + 0, K, prior=prior, guess_state=guess)
    return chosen, logits.gather(1, chosen.long().clamp(min=0)).sum(1) + guess[:, 0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str) -> None:
    compiled: Callable[..., Any] = torch.compile(decode_step, fullgraph=True, backend=backend)
    states = [(torch.full((2, K), -1, dtype=torch.int32), gvr_topk.new_guess_state(2)) for _ in range(2)]
    for step in range(3):  # the written state of one step is read by the next one
        logits, lengths = scores(2, seed=step), int32(WIDTH - 3 + step, 20 + step)
        wanted = decode_step(logits, lengths, *states[0])
        got = compiled(logits, lengths, *states[1])
        assert all(torch.equal(a, b) for a, b in zip((*wanted, *states[0]), (*got, *states[1]), strict=True))
    assert (states[0][1] >= 0).all()  # the hint was used, or the test has shown little
