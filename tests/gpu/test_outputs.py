"""What is written beside the result: counts, cache slots, the gate's reasons, and states by row."""

from __future__ import annotations

import pytest
import torch
from contents import int32, normal
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
    run,
    visible_lengths,
)
from torch import Tensor

from gvr_topk.constants import STATE_UNKNOWN, GuessSource, HintReason, Path, StatsColumn
from gvr_topk.contract import DTYPES
from gvr_topk.policy import can_use_heuristic, plan

K = 2048
WIDTHS = (900, 8192, 40_001, 131_072, 300_004)
"""One CTA for a row, clusters that hold it, and rows that stream; some of them off alignment."""


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
    assert known[0] or dtype != torch.float32  # Of 16-bit scores, which are tied, a step may leave nothing.
    stats = new_stats(5)
    exact(logits, lengths, K, path=path, state=state, row_slot=row_slot, stats=stats)
    wanted = [
        can_use_heuristic(
            length=length,
            k=K,
            enabled=path == "auto",
            slot=slot,
            slots=slots,
            known=0 <= slot < slots and known[slot],
        ).reason
        for length, slot in zip(lengths.tolist(), row_slot.tolist(), strict=True)
    ]
    assert [reason.name.lower() for reason in reasons_of(stats)] == wanted
    if path == "auto" and dtype == torch.float32:
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


# ---------------------------------------------------------------- states by row


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
