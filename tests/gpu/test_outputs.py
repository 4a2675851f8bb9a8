"""Lengths by row, and what is written beside the result: counts, cache slots, and the gate's reasons."""

from __future__ import annotations

import pytest
import torch
from contents import int32, normal
from launches import skip_unserved
from oracle import (
    ANY_K,
    PATHS,
    POISON,
    columns,
    exact,
    full_lengths,
    new_state,
    new_stats,
    place,
    poisoned,
    run,
    visible_lengths,
    wrong_rows,
)
from torch import Tensor

from gvr_topk.constants import STATE_UNKNOWN, GuessSource, HintReason, Path, StatsColumn
from gvr_topk.contract import DTYPES
from gvr_topk.cpu import to_slots
from gvr_topk.policy import can_use_heuristic, plan

K = 2048
INT32 = torch.iinfo(torch.int32)
WIDTHS = (900, 8192, 40_001, 131_072, 300_004)
"""One CTA for a row, clusters that hold it, and rows that stream; some of them off alignment."""


# ---------------------------------------------------------------- lengths by row


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("next_n", [2, 3])
def test_lengths_by_row_do_as_those_by_request(next_n: int, width: int, path: str) -> None:
    skip_unserved(path, width)
    requests = 4
    logits = normal(requests * next_n, width)
    by_request = int32(width, K + next_n, 1, width - 7)
    by_row = visible_lengths(logits, by_request, next_n).to(torch.int32)
    written = []
    for lengths in (by_request, by_row):
        state = new_state(requests, K, keep_indices=True)
        counts = poisoned(requests * next_n)
        for _ in range(2):
            got = run(logits, lengths, K, next_n=next_n, path=path, state=state, counts=counts)
        assert wrong_rows(got, logits, lengths, K, next_n) == []
        written.append((got, counts, state.indices))
    for ours, theirs in zip(*written, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("next_n", [2, 3])
def test_any_lengths_by_row(next_n: int, width: int, path: str) -> None:
    """Rows of one request of which some are empty, some short and some longer than the buffer."""
    skip_unserved(path, width)
    lengths = [0, width, -1, K, K + 1, INT32.min, width + 5, 1, INT32.max, width // 2, -width, width - 1]
    rows = len(lengths)
    logits, seq_lens = normal(rows, width), int32(*lengths)
    state = new_state(rows // next_n, K, keep_indices=True)
    assert state.indices is not None
    draw = torch.Generator().manual_seed(width)
    for _ in range(4):
        counts = poisoned(rows)
        got = exact(logits, seq_lens, K, next_n=next_n, path=path, state=state, counts=counts)
        visible = visible_lengths(logits, seq_lens, next_n)
        assert torch.equal(counts, visible.clamp(0, K).to(torch.int32))
        assert torch.equal(state.indices, got[next_n - 1 :: next_n])
        seq_lens = seq_lens[torch.randperm(rows, generator=draw).to("cuda")]


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_counts(width: int, dtype: torch.dtype, path: str) -> None:
    skip_unserved(path, width)
    logits = normal(7, width, dtype)
    lengths = int32(width, 0, -5, 1, K, K + 1, width + 9)
    for k in (512, K):
        guarded = poisoned(7 + 8)
        got = exact(logits, lengths, k, path=path, counts=guarded[3:10])
        assert torch.equal(guarded[3:10], (got >= 0).sum(dim=1).to(torch.int32))
        assert bool((guarded[:3] == POISON).all() and (guarded[10:] == POISON).all())


@pytest.mark.parametrize("path", ANY_K)
@pytest.mark.parametrize("k", [1, 7, 3000, 50_000])
def test_counts_of_any_k(k: int, path: str) -> None:
    logits, lengths = normal(4, 60_000), int32(60_000, 2999, 50_001, 0)
    counts = poisoned(4)
    exact(logits, lengths, k, path=path, counts=counts)
    assert counts.tolist() == [min(length, k) for length in lengths.tolist()]


# ---------------------------------------------------------------- cache slots beside positions


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", [1, 64, 100])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("next_n", [1, 2])
def test_slots_beside_positions(next_n: int, width: int, page_size: int, path: str) -> None:
    """A third of the pages is missing, and the table ends before the rows do."""
    skip_unserved(path, width)
    requests, k = 3, 512
    draw = torch.Generator(device="cuda").manual_seed(width + page_size)
    shape = (requests, max(1, width // page_size - 3))
    table = torch.randint(0, 1 << 20, shape, dtype=torch.int32, device="cuda", generator=draw)
    table[torch.rand(shape, device="cuda", generator=draw) < 0.3] = -1
    table[:, -1] = INT32.max  # whose slots no int32 holds, unless a page has one position
    logits, lengths = normal(requests * next_n, width), int32(width, 300, width - 1)
    rows = requests * next_n
    state = new_state(requests, k, keep_indices=True)
    assert state.indices is not None
    for _ in range(2):
        slots = poisoned(rows, k + 5)
        counts = poisoned(rows)
        paged = {"page_table": table, "page_size": page_size, "slots": slots, "counts": counts}
        positions = exact(logits, lengths, k, next_n=next_n, path=path, state=state, **paged)
        assert torch.equal(slots[:, :k], to_slots(positions, table, page_size, next_n))
        assert bool((slots[:, k:] == POISON).all())
        assert torch.equal(state.indices, positions[next_n - 1 :: next_n])
        # A position without a page is one of the row's all the same.
        assert torch.equal(counts, (positions >= 0).sum(dim=1).to(torch.int32))


@pytest.mark.parametrize("path", PATHS)
def test_slots_with_rows_off_alignment(path: str) -> None:
    rows, width, k = 4, 20_000, 512
    table = torch.arange(rows * 40, dtype=torch.int32, device="cuda").view(rows, 40)
    logits = place(normal(rows, width), pad=3, shift=1)
    lengths = full_lengths(logits)
    slots = poisoned(rows * (k + 1) + 1)
    view = slots[1:].view(rows, k + 1)[:, :k]
    positions = exact(logits, lengths, k, path=path, page_table=table, page_size=512, slots=view)
    assert torch.equal(view, to_slots(positions, table, 512, 1))
    assert int((slots == POISON).sum()) == rows + 1


# ---------------------------------------------------------------- the gate's reasons

REASON_WIDTHS = {"small_row": 8192, "resident": 131_072, "streaming": 1 << 20}


def reasons_of(stats: Tensor) -> list[HintReason]:
    return [HintReason(reason) for reason in columns(stats)[StatsColumn.REASON]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("path", ANY_K)
@pytest.mark.parametrize("family", REASON_WIDTHS)
def test_reasons_are_the_gate_s(family: str, path: str, aligned: bool, dtype: torch.dtype) -> None:
    """Rows of every kind in one launch: used, first step, two without a slot, and one that is short."""
    width, slots = REASON_WIDTHS[family], 3
    row_slot, lengths = int32(0, 1, -1, slots + 4, 2), int32(width, width, width, width, K)
    assert plan(rows=5, width=width, k=K, dtype=dtype).family == family
    logits = place(normal(5, width, dtype), pad=0 if aligned else 1)
    state = new_state(slots, K)
    for _ in range(3):
        run(logits, lengths, K, state=state, row_slot=row_slot)
    state.reset(1)
    known = (state.words[:, 0] != STATE_UNKNOWN).tolist()
    # Of 16-bit scores that are tied, or that are not aligned, a step may leave nothing.
    assert known[0] or dtype != torch.float32 or not aligned
    stats = new_stats(5)
    exact(logits, lengths, K, path=path, state=state, row_slot=row_slot, stats=stats)
    wanted = [
        can_use_heuristic(
            length=length,
            k=K,
            enabled=path == "auto",
            aligned=aligned,
            slot=slot,
            slots=slots,
            known=0 <= slot < slots and known[slot],
        ).reason
        for length, slot in zip(lengths.tolist(), row_slot.tolist(), strict=True)
    ]
    assert [reason.name.lower() for reason in reasons_of(stats)] == wanted
    if path == "auto" and aligned and dtype == torch.float32:
        assert wanted == ["used", "first_step", "no_slot", "no_slot", "short_row"]


@pytest.mark.parametrize("path", ANY_K)
@pytest.mark.parametrize("family", REASON_WIDTHS)
def test_reasons_without_a_state(family: str, path: str) -> None:
    width = REASON_WIDTHS[family]
    logits, lengths, stats = normal(2, width), int32(width, K), new_stats(2)
    run(logits, lengths, K, path=path, stats=stats)
    wanted = HintReason.NO_STATE if path == "auto" else HintReason.DISABLED
    assert reasons_of(stats) == [wanted] * 2
    assert columns(stats)[StatsColumn.HITS] == [-1] * 2


def test_reasons_of_the_paper_s_kernel() -> None:
    logits, state = normal(3, 70_000), new_state(2, K, keep_indices=True)
    lengths, row_slot = int32(70_000, 70_000, 9), int32(0, -1, 1)
    for first in (HintReason.FIRST_STEP, HintReason.USED):
        stats = new_stats(3)
        run(logits, lengths, K, path="paper_gvr", state=state, row_slot=row_slot, stats=stats)
        assert reasons_of(stats) == [first, HintReason.NO_SLOT, HintReason.SHORT_ROW]


@pytest.mark.parametrize("family", REASON_WIDTHS)
def test_radix_rounds_estimate_nothing(family: str) -> None:
    width = REASON_WIDTHS[family]
    assert plan(rows=2, width=width, k=K, path=Path.RADIX_ROUNDS.name.lower()).family == "fallback"
    logits, state, stats = normal(2, width), new_state(2, K), new_stats(2)
    for _ in range(2):
        exact(logits, full_lengths(logits), K, path="radix_rounds", state=state, stats=stats)
        seen = columns(stats)
        assert seen[StatsColumn.GUESS] == [GuessSource.NONE] * 2
        assert seen[StatsColumn.GUESS_HIT] == [0] * 2
        assert all(rounds > 0 for rounds in seen[StatsColumn.DONE])


def test_the_hint_of_one_path_is_good_for_another() -> None:
    """Whatever path a step took, the next one is exact and finds a state it may use."""
    logits, state = normal(2, 131_072), new_state(2, K, keep_indices=True)
    lengths = full_lengths(logits)
    for before in PATHS:
        for path in PATHS:
            for its in (before, path):
                got = exact(logits, lengths, K, path=its, state=state, said=(before, path))
                assert torch.equal(state.indices, got)


# ---------------------------------------------------------------- compressed keys, states by row


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ratio", [2, 4, 128])
@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_lengths_that_count_keys(width: int, next_n: int, ratio: int, path: str) -> None:
    """Rows of scores to several keys select as rows whose lengths count scores."""
    skip_unserved(path, width)
    requests, k = 4, 512
    logits = normal(requests * next_n, width)
    keys = int32(ratio * width + ratio - 1, ratio * (k + 1), next_n, INT32.max)
    row = torch.arange(requests * next_n, device="cuda")
    seen = (keys.to(torch.int64)[row // next_n] - next_n + row % next_n + 1).clamp(min=0)
    scores = (seen // ratio).clamp(max=width).to(torch.int32)
    by_row = seen.to(torch.int32)
    for lengths in (keys, by_row):
        state = new_state(requests, k)
        for _ in range(2):
            counts = poisoned(requests * next_n)
            got = run(
                logits, lengths, k, next_n=next_n, path=path, state=state, counts=counts, compress_ratio=ratio
            )
            # Every row is a request here, because its length counts what it sees.
            assert wrong_rows(got, logits, scores, k) == []
            assert torch.equal(counts, scores.clamp(max=k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_states_by_row_leave_the_slots_alone(width: int, dtype: torch.dtype) -> None:
    """Each row leaves what it would leave as a request of its own, and no slot changes."""
    requests, next_n, k = 3, 2, 512
    rows = requests * next_n
    logits, lengths = normal(rows, width, dtype), int32(width, k + 1, width - 5)
    state, alone = new_state(requests, k), new_state(rows, k)
    visible = visible_lengths(logits, lengths, next_n).to(torch.int32)
    for _ in range(3):
        before = state.words.clone()
        alone.words.copy_(before.repeat_interleave(next_n, dim=0))
        guarded, again = (torch.full((rows + 2, 4), poison, device="cuda") for poison in (POISON * 1.0, -1.5))
        for left in (guarded, again):
            exact(logits, lengths, k, next_n=next_n, state=state, next_state=left[1:-1])
            assert torch.equal(state.words, before)
        assert bool((guarded[[0, -1]] == POISON).all())
        assert torch.equal(guarded[1:-1].view(torch.int32), again[1:-1].view(torch.int32))
        run(logits, visible, k, state=alone)
        left, expected = guarded[1:-1], alone.words
        selected = visible > k
        assert torch.equal(left[selected], expected[selected])
        assert left[~selected].tolist() == [[STATE_UNKNOWN, 0.0, 0.0, 0.0]] * int((~selected).sum())
        accepted = int32(1, 2, 2)
        state.accept(guarded[1:-1].clone(), torch.arange(requests, device="cuda"), accepted)
        last = torch.arange(requests, device="cuda") * next_n + accepted - 1
        assert torch.equal(state.words[:, 0], left[last, 0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", WIDTHS)
def test_states_by_row_leave_kept_positions_alone(width: int, path: str) -> None:
    """Slots are then read alone, words and positions, also those that `row_slot` names."""
    skip_unserved(path, width)
    next_n, k, row_slot = 2, 512, int32(2, 2, 0, 0, -1, -1)
    logits, lengths = normal(6, width), int32(width, k + 1, 9)
    state = new_state(4, k, keep_indices=True)
    for _ in range(2):
        run(logits, lengths, k, next_n=next_n, path=path, state=state, row_slot=row_slot)
    words, indices = state.words.clone(), state.indices.clone()
    left = torch.full((6, 4), float(POISON), device="cuda")
    options = {"next_n": next_n, "path": path, "state": state, "row_slot": row_slot}
    exact(logits, lengths, k, next_state=left, **options)
    assert torch.equal(state.words.view(torch.int32), words.view(torch.int32))
    assert torch.equal(state.indices, indices)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keep_indices", [False, True])
def test_rows_without_a_slot_leave_a_state_by_row(path: str, keep_indices: bool) -> None:
    """Whoever accepts such a row later must not copy what was in memory before."""
    k, width = 512, 40_000
    logits, lengths = normal(4, width), int32(width, width - 7, k, 9)
    row_slot, state = int32(-1, 0, -1, 1), new_state(2, k, keep_indices=keep_indices)
    left = torch.full((4, 4), float(POISON), device="cuda")
    exact(logits, lengths, k, path=path, state=state, row_slot=row_slot, next_state=left)
    assert not bool((left[:, 0] == POISON).any())
