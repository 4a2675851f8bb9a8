"""The op on the CPU: result, state written back, statistics, page table, errors, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rows import ROWS, WIDTH, int32, scores
from torch import Tensor

import gvr_topk
from gvr_topk import TopkState
from gvr_topk.arguments import DecodeArguments, TopkItemsArguments
from gvr_topk.constants import (
    MAX_WIDTH,
    STATE_FLOATS,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    HintReason,
    Path,
    StatsColumn,
)
from gvr_topk.contract import DTYPES, row_lengths
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.policy import asks_for_hint

OP = torch.ops.gvr_topk.indexer_topk_decode.default
USUAL = torch.ops.gvr_topk.indexer_topk_decode.usual
K, NEXT_N = 8, 2
REQUESTS = ROWS // NEXT_N


NAN, INF = float("nan"), float("inf")
LENGTHS = int32(WIDTH, 30, 9)
TABLE = torch.arange(12, dtype=torch.int32).reshape(3, 4)
PAGE = 16


def state(slots: int, indices: Tensor | None = None, first: float = STATE_UNKNOWN) -> TopkState:
    """Slots that all hold this number first and zeros behind it, and these positions."""
    words = torch.zeros(slots, STATE_FLOATS)
    words[:, 0] = first
    return unchecked(words, indices)


def unchecked(words: Tensor, indices: Tensor | None = None) -> TopkState:
    """A state of tensors that `TopkState.of` might refuse, for the op to judge."""
    kept = TopkState(1, K)
    kept.words, kept.indices = words, indices
    return kept


def call(**changes: Any) -> Tensor:
    """One valid call with every optional argument, some of them replaced."""
    arguments: dict[str, Any] = {
        "logits": scores(),
        "seq_lens": LENGTHS,
        "k": K,
        "next_n": NEXT_N,
        "state": state(4, torch.zeros(4, K, dtype=torch.int32)),
        "row_slot": int32(0, 0, 3, 3, 1, 1),
        "counts": torch.zeros(ROWS, dtype=torch.int32),
        "page_table": TABLE,
        "page_size": PAGE,
        "slots": torch.zeros(ROWS, K, dtype=torch.int32),
        "stats": torch.zeros(ROWS, 8, dtype=torch.int32),
    }
    return gvr_topk.indexer_topk_decode(**{**arguments, **changes})


def expected(seq_lens: Tensor = LENGTHS, k: int = K, next_n: int = NEXT_N, **options: Any) -> Tensor:
    """What `call` must return, by an implementation that shares no code with the op."""
    logits = scores(**options)
    lengths = row_lengths(seq_lens, len(logits), next_n).clamp(max=logits.shape[1])
    return sorted_topk(logits, lengths, k)


def measured(arguments: dict[str, Any]) -> DecodeArguments:
    """One call as the op sees it, with arguments that the public function does not have.

    Without a page table there is no page size.
    """
    plain: dict[str, Any] = {
        "logits": scores(),
        "seq_lens": LENGTHS,
        "out": torch.zeros(ROWS, K, dtype=torch.int32),
        "row_slot": int32(0, 0, 3, 3, 1, -1),
        "state": torch.zeros(4, STATE_FLOATS),
        "indices": torch.zeros(4, K, dtype=torch.int32),
        "counts": torch.zeros(ROWS, dtype=torch.int32),
        "page_table": TABLE,
        "slots": torch.zeros(ROWS, K, dtype=torch.int32),
        "stats": torch.zeros(ROWS, 8, dtype=torch.int32),
        "k": K,
        "next_n": NEXT_N,
    }
    paged = {**plain, **arguments}["page_table"] is not None
    return DecodeArguments(**{**plain, "page_size": PAGE * paged, **arguments})


def test_hinted_positions_past_the_width_do_not_count() -> None:
    hint = torch.full((1, K), WIDTH, dtype=torch.int32)
    hint[0, 0] = scores(1).argmax()
    stats = torch.zeros(1, 8, dtype=torch.int32)
    gvr_topk.indexer_topk_decode(scores(1), int32(10_000), K, state=state(1, hint), stats=stats)
    assert stats[0, StatsColumn.HITS] == 1


def test_out_is_written_in_place_and_no_further_than_k() -> None:
    out = torch.full((ROWS, K + 3), -7, dtype=torch.int32)
    got = call(out=out)
    assert got is out
    assert (out[:, K:] == -7).all() and (out[:, :K] != -7).all()


@pytest.mark.parametrize("k", [1, MAX_WIDTH])
def test_the_fewest_and_the_most_items(k: int) -> None:
    """Also at the largest offsets, which lead out of every row."""
    for offset in (-MAX_WIDTH, MAX_WIDTH):
        got = gvr_topk.indexer_topk_decode(scores(1), int32(WIDTH), k, hint_offset=offset)
        assert got.shape == (1, k) and int((got >= 0).sum()) == min(k, WIDTH)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_integers(kind: Callable[[int], Any]) -> None:
    changes = {"k": kind(K), "next_n": kind(NEXT_N), "page_size": kind(PAGE), "hint_offset": kind(1)}
    assert torch.equal(call(**changes, max_ctas=kind(4)), expected())


def test_rows_of_scores_may_overlap() -> None:
    row = scores(1)
    lengths = torch.full((ROWS,), WIDTH, dtype=torch.int32)
    got = gvr_topk.indexer_topk_decode(row.expand(ROWS, WIDTH), lengths, K)
    assert torch.equal(got, sorted_topk(row, lengths[:1], K).expand(ROWS, K))
    windows = scores(1, width=WIDTH + ROWS - 1)[0].as_strided((ROWS, WIDTH), (1, 1))
    got = gvr_topk.indexer_topk_decode(windows, lengths, K)
    assert torch.equal(got, sorted_topk(windows.clone(), lengths, K))


def test_no_rows() -> None:
    got = gvr_topk.indexer_topk_decode(torch.empty(0, 10), int32(), 4)
    assert got.shape == (0, 4) and got.dtype == torch.int32


def test_slots_and_kept_positions_of_dropped_rows_are_those_of_their_items() -> None:
    logits = scores()
    logits[:, 3:] = -INF
    hint, slots = torch.full((4, K), 5, dtype=torch.int32), torch.full((ROWS, K), -7, dtype=torch.int32)
    kept, stats = state(4, hint, STATE_VALUE_ONLY), torch.zeros(ROWS, 8, dtype=torch.int32)
    got = call(logits=logits, state=kept, slots=slots, stats=stats, drop_masked=True)
    assert got.tolist() == [[0, 1, 2] + [-1] * (K - 3)] * ROWS
    wanted = TABLE[:, :1].repeat_interleave(NEXT_N, dim=0) * PAGE + torch.arange(3)
    assert torch.equal(slots[:, :3], wanted.to(torch.int32)) and (slots[:, 3:] == -1).all()
    assert torch.equal(hint[[0, 3, 1]], got[1::2])
    # What the next step predicts from, and what is counted, is the k-th value all the same.
    assert kept.words[[0, 3, 1], 0].tolist() == [STATE_MASKED] * 3
    assert (stats[:, StatsColumn.HITS] == torch.tensor([K, K, K, K, -1, K])).all()
    without, hint = torch.zeros_like(stats), torch.full((4, K), 5, dtype=torch.int32)
    call(logits=logits, state=state(4, hint, STATE_VALUE_ONLY), stats=without)
    assert torch.equal(stats, without)


# ---------------------------------------------------------------- state in, state out


@pytest.mark.parametrize("slot", [-1, -(2**31), 4, 2**31 - 1])
def test_padding_rows_neither_read_nor_write(slot: int) -> None:
    hint = torch.full((4, K), 5, dtype=torch.int32)
    kept = state(4, hint, 0.25)
    stats = torch.zeros(ROWS, 8, dtype=torch.int32)
    got = call(state=kept, stats=stats, row_slot=torch.full((ROWS,), slot, dtype=torch.int32))
    assert (hint == 5).all() and torch.equal(kept.words, state(4, None, 0.25).words)
    assert (stats[:, StatsColumn.HITS] == -1).all()
    reasons = [HintReason(reason) for reason in stats[:, StatsColumn.REASON].tolist()]
    selected = row_lengths(LENGTHS, ROWS, NEXT_N) > K
    assert reasons == [HintReason.NO_SLOT if n else HintReason.SHORT_ROW for n in selected.tolist()]
    assert torch.equal(got, expected())


def test_rows_read_what_their_slot_held_before_the_call() -> None:
    """An earlier row of a later request names the slot that the last row of the first one writes."""
    slots = int32(2, 2, 2, 5)
    hint = torch.arange(K, dtype=torch.int32).expand(6, K).clone()
    kept = state(6, hint)
    stats = torch.zeros(4, 8, dtype=torch.int32)
    logits, lengths = scores(4), int32(WIDTH, WIDTH)
    got = gvr_topk.indexer_topk_decode(
        logits, lengths, K, next_n=2, state=kept, row_slot=slots, stats=stats, path="auto"
    )
    visible = row_lengths(lengths, 4, 2)
    assert torch.equal(got, sorted_topk(logits, visible, K))
    kth = logits.gather(1, got.to(torch.int64)).amin(1)
    assert stats[:, StatsColumn.HITS].tolist() == (logits[:, :K] >= kth[:, None]).sum(1).tolist()
    assert len(set(stats[:, StatsColumn.HITS].tolist()) | {K}) > 1  # a row's own choice would all be hits
    assert stats[:, StatsColumn.REASON].tolist() == [HintReason.FIRST_STEP] * 4
    assert kept.indices is not None and kept.indices[2].tolist() == got[1].tolist()
    assert kept.indices[5].tolist() == got[3].tolist() and (kept.indices[[0, 1, 3, 4]] == hint[0]).all()


def test_short_rows_leave_padded_positions_and_the_value_that_was_there() -> None:
    kept = state(1, torch.full((1, K), 5, dtype=torch.int32), 0.25)
    gvr_topk.indexer_topk_decode(scores(1), int32(3), K, state=kept)
    assert kept.indices is not None and kept.indices.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]
    assert kept.words.tolist() == [[0.25, 0, 0, 0]]


@pytest.mark.parametrize("offset", [0, 1, -2])
def test_hits_count_the_hinted_values_that_are_large_enough(offset: int) -> None:
    logits = scores(1, seed=3)
    length = 50
    # Inside, twice the same, and outside at both ends, before and after the offset.
    hint = [0, 3, 3, 47, 49, 60, -1, 12]
    stats = torch.zeros(1, 8, dtype=torch.int32)
    kept = state(1, int32(*hint).reshape(1, K))
    got = gvr_topk.indexer_topk_decode(logits, int32(length), K, state=kept, stats=stats, hint_offset=offset)
    kth = min(logits[0, i].item() for i in got[0].tolist())
    hinted = [h + offset for h in hint if h >= 0 and 0 <= h + offset < length]
    assert stats[0, StatsColumn.HITS] == sum(logits[0, h].item() >= kth for h in hinted)
    assert kept.words.tolist() == [[STATE_VALUE_ONLY, kth, 0, 0]]


def test_padding_of_the_hint_stays_padding_under_an_offset() -> None:
    """-1 plus 1 is not position 0, even where that is the largest score of the row."""
    logits = torch.zeros(1, 32)
    logits[0, :3] = torch.tensor([9.0, 8.0, 7.0])
    stats = torch.zeros(1, 8, dtype=torch.int32)
    kept = state(1, int32(-1, -1, 0).reshape(1, 3))
    gvr_topk.indexer_topk_decode(logits, int32(32), 3, state=kept, stats=stats, hint_offset=1)
    assert stats[0, StatsColumn.HITS] == 1  # position 1, from 0 + 1


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("keep_indices", [True, False])
def test_of_requests_that_name_one_slot_the_last_one_leaves_its_state(
    keep_indices: bool, next_n: int
) -> None:
    rows, lengths = 12, torch.full((12,), WIDTH, dtype=torch.int32)
    row_slot = int32(2, 2, 0, 2, 1, 1, 2, 2, 0, 0, -1, -1)
    last = {0: 9, 1: 5, 2: 7}
    kept = TopkState(4, K, keep_indices=keep_indices)
    logits = scores(rows) + torch.arange(rows)[:, None]  # so that all k-th values differ
    got = gvr_topk.indexer_topk_decode(
        logits, lengths, K, next_n=next_n, state=kept, row_slot=row_slot, path="no_hint"
    )
    assert torch.equal(got, sorted_topk(logits, lengths, K))
    for slot, row in last.items():
        kth = float(logits[row].topk(K).values.min())
        assert kept.words[slot].tolist() == [STATE_VALUE_ONLY, kth, 0.0, 0.0]
        assert kept.indices is None or torch.equal(kept.indices[slot], got[row])
    assert kept.words[3, 0] == STATE_UNKNOWN  # nobody's slot


@pytest.mark.parametrize(
    ("row", "left"),
    [
        ([3.0, 1.0, 2.0], [STATE_VALUE_ONLY, 2.0]),
        ([NAN, 1.0, 2.0], [STATE_VALUE_ONLY, 2.0]),
        ([NAN, INF, 2.0], [STATE_INFINITE, 0.0]),
        ([NAN, NAN, 2.0], [STATE_INFINITE, 0.0]),
        ([-INF, -INF, 2.0], [STATE_MASKED, 0.0]),
        ([-INF, -1.5, 2.0], [STATE_VALUE_ONLY, -1.5]),
    ],
)
def test_a_slot_holds_the_kth_value(row: list[float], left: list[float]) -> None:
    kept = TopkState(1, 2)
    gvr_topk.indexer_topk_decode(torch.tensor([row]), int32(3), 2, state=kept)
    assert kept.words.tolist() == [[*left, 0.0, 0.0]]


@pytest.mark.parametrize("path", Path)
def test_statistics_say_why_the_state_is_used_or_not(path: Path) -> None:
    stats = torch.full((5, 8), 77, dtype=torch.int32)
    k, width = 512, 600  # path paper_gvr takes no smaller k
    kept = TopkState(2, k)
    lengths, row_slot = int32(k + 1, k, 0, width, width), int32(0, 1, -1, -1, 2)
    for first in (HintReason.FIRST_STEP, HintReason.USED):
        gvr_topk.indexer_topk_decode(
            scores(5, width=width), lengths, k, state=kept, row_slot=row_slot, stats=stats, path=path
        )
        by_gate = [first, HintReason.SHORT_ROW, HintReason.SHORT_ROW, HintReason.NO_SLOT, HintReason.NO_SLOT]
        wanted = by_gate if asks_for_hint(path) else [HintReason.DISABLED] * 5
        assert stats[:, StatsColumn.REASON].tolist() == wanted
    assert (stats != 77).all()


def test_statistics_without_a_state() -> None:
    stats = torch.full((2, 8), 77, dtype=torch.int32)
    gvr_topk.indexer_topk_decode(scores(2), int32(K + 1, K), K, stats=stats)
    assert stats[:, StatsColumn.REASON].tolist() == [HintReason.NO_STATE] * 2
    assert stats[:, StatsColumn.HITS].tolist() == [-1, -1]


# ---------------------------------------------------------------- page table


def paged(table: Tensor, page_size: int, positions: list[int]) -> list[int]:
    """Slots that the op gives for these positions, the highest scores of one row."""
    logits = torch.zeros(1, 64)
    logits[0, positions] = 1
    kept = TopkState(1, len(positions))
    got = gvr_topk.indexer_topk_decode(
        logits, int32(64), len(positions), page_table=table, page_size=page_size, state=kept
    )
    assert kept.indices is not None and kept.indices.tolist() == [positions]
    return [int(slot) for slot in got[0]]


def test_a_page_table_without_columns_leaves_positions_in_out_where_slots_are_apart() -> None:
    none = torch.zeros(REQUESTS, 0, dtype=torch.int32)
    slots = torch.full((ROWS, K + 1), -7, dtype=torch.int32)
    assert torch.equal(call(page_table=none, slots=slots), expected())
    assert (slots[:, :K] == -1).all() and (slots[:, K] == -7).all()


def test_statistics_of_clamped_rows_are_those_of_their_lengths() -> None:
    """Hinted positions behind the table do not count, and a row that the table ends at k is short."""
    hint = torch.full((1, K), WIDTH - 1, dtype=torch.int32)
    hint[0, 0] = scores(1)[0, : 2 * PAGE].argmax()
    for pages, hits, reason in ((2, 1, HintReason.USED), (0, -1, HintReason.SHORT_ROW)):
        stats, kept = torch.zeros(1, 8, dtype=torch.int32), state(1, hint.clone(), STATE_VALUE_ONLY)
        paged = {"page_table": TABLE[:1, :pages], "page_size": PAGE, "clamp_pages": True}
        gvr_topk.indexer_topk_decode(scores(1), int32(WIDTH), K, state=kept, stats=stats, **paged)
        assert stats[0, [StatsColumn.HITS, StatsColumn.REASON]].tolist() == [hits, reason]


def test_slots_that_int32_cannot_hold_are_minus_one() -> None:
    # The last slot of 32 bits, 2**31 - 1, is page 2**27 - 1 of 16 positions, its last one.
    table = int32(2**27 - 1, 2**27, 2**31 - 1, 1).reshape(1, 4)
    assert paged(table, 16, [0, 15, 16, 31, 32, 48]) == [2**31 - 16, 2**31 - 1, -1, -1, -1, 16]
    # In 32 bits these would wrap to slots that look right.
    assert paged(int32(2**16, 5).reshape(1, 2), 2**16, [0, 1]) == [-1, -1]


# ---------------------------------------------------------------- torch.library and torch.compile


@pytest.mark.parametrize(
    "absent",
    [
        (),
        ("page_table", "slots"),
        ("slots",),
        ("counts", "stats"),
        ("indices",),
        ("row_slot",),
        ("indices", "row_slot"),
        ("state", "indices", "row_slot"),
        ("state", "indices", "row_slot", "stats", "counts", "page_table", "slots"),
    ],
    ids=lambda names: "all" if not names else "no " + ",".join(names),
)
def test_opcheck(absent: tuple[str, ...]) -> None:
    torch.library.opcheck(OP, tuple(measured(dict.fromkeys(absent))))


@pytest.mark.parametrize("count", [4, 6, 9])
def test_opcheck_of_the_usual_arguments(count: int) -> None:
    arguments = measured({"seq_lens": int32(*range(5, 5 + ROWS)), "next_n": 1})
    torch.library.opcheck(USUAL, tuple(arguments)[:count])


@pytest.mark.parametrize("flags", [2 + 4, 2 + 8, 2 + 4 + 8])
def test_opcheck_of_options(flags: int) -> None:
    masked = scores()
    masked[:, 2:] = -INF
    torch.library.opcheck(OP, tuple(measured({"flags": flags, "logits": masked, "page_table": TABLE[:, :2]})))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_row", [False, True])
def test_opcheck_of_dtypes_strides_and_lengths(dtype: torch.dtype, by_row: bool) -> None:
    changes = {
        "logits": scores(width=2 * WIDTH, dtype=dtype)[:, :WIDTH],
        "out": torch.zeros(ROWS, K + 2, dtype=torch.int32),
        "seq_lens": int32(*range(5, 5 + ROWS)) if by_row else LENGTHS,
    }
    torch.library.opcheck(OP, tuple(measured(changes)))


def decode_step(logits: Tensor, seq_lens: Tensor, kept: TopkState) -> tuple[Tensor, Tensor]:
    chosen = gvr_topk.indexer_topk_decode(logits * 2, seq_lens + 0, K, state=kept)
    return chosen, logits.gather(1, chosen.long().clamp(min=0)).sum(1) + kept.words[:, 1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str) -> None:
    compiled: Callable[..., Any] = torch.compile(decode_step, fullgraph=True, backend=backend)
    kept = [TopkState(2, K) for _ in range(2)]
    for step in range(3):  # the written state of one step is read by the next one
        logits, lengths = scores(2, seed=step), int32(WIDTH - 3 + step, 20 + step)
        wanted = decode_step(logits, lengths, kept[0])
        got = compiled(logits, lengths, kept[1])
        assert torch.equal(got[0], sorted_topk(logits, lengths, K))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert torch.equal(kept[0].words, kept[1].words)
        assert kept[0].indices is not None and kept[1].indices is not None
        assert torch.equal(kept[0].indices, kept[1].indices)
    assert (kept[0].words[:, 0] != STATE_UNKNOWN).all()  # steps left something, or the test has shown little


# ---------------------------------------------------------------- compressed keys, states by row


def test_states_by_row_leave_the_slots_alone() -> None:
    words = torch.full((ROWS // NEXT_N, STATE_FLOATS), 7.0)
    kept = TopkState.of(words.clone(), None, K)
    left = torch.zeros(ROWS, STATE_FLOATS)
    assert torch.equal(call(state=kept, row_slot=None, next_state=left), expected())
    assert torch.equal(kept.words, words)
    lengths = row_lengths(LENGTHS, ROWS, NEXT_N)
    for row in range(ROWS):
        if int(lengths[row]) > K:
            kth = scores()[row, : int(lengths[row])].topk(K).values.min()
            assert left[row].tolist() == [STATE_VALUE_ONLY, float(kth), 0.0, 0.0]
        else:
            assert float(left[row, 0]) == STATE_UNKNOWN
    alone = torch.zeros(ROWS, STATE_FLOATS)  # without a state, rows leave the same
    gvr_topk.indexer_topk_decode(scores(), LENGTHS, K, next_n=NEXT_N, next_state=alone)
    assert torch.equal(alone, left)


# ---------------------------------------------------------------- values and indices


@pytest.mark.parametrize(
    ("sorted", "largest", "wanted"),
    [
        (0, 1, [0, 1, 3, 4]),
        (1, 1, [3, 0, 1, 4]),
        (0, 0, [0, 1, 2, 4]),
        (1, 0, [2, 4, 0, 1]),
    ],
)
def test_items_in_every_order(sorted: int, largest: int, wanted: list[int]) -> None:
    rows, names = torch.tensor([[4.0, 4.0, 0.5, NAN, 1.0]]), torch.tensor([[5, 6, 7, 8, 9]])
    values, indices = torch.empty(1, 4), torch.empty(1, 4, dtype=torch.int64)
    for candidates in (None, names):
        gvr_topk.ops.launch(TopkItemsArguments(rows, indices, values, sorted, largest, candidates))
        assert indices.tolist() == [[index + 5 * (candidates is names) for index in wanted]]
        assert torch.equal(values.nan_to_num(nan=7.25), rows[:, wanted].nan_to_num(nan=7.25))
        alone = torch.empty_like(indices)
        tracked = rows.clone().requires_grad_()
        gvr_topk.ops.launch(TopkItemsArguments(tracked, indices, values, sorted, largest, candidates))
        assert not values.requires_grad  # as on a GPU
        gvr_topk.ops.launch(TopkItemsArguments(rows, alone, None, sorted, largest, candidates))
        assert torch.equal(alone, indices)


def test_items_of_no_rows_and_no_items() -> None:
    for rows, width, k in ((0, 3, 2), (2, 3, 0), (2, 0, 0)):
        values, indices = torch.ones(rows, k), torch.ones(rows, k, dtype=torch.int64)
        gvr_topk.ops.launch(TopkItemsArguments(torch.ones(rows, width), indices, values, 1))
