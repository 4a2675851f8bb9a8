"""What one step leaves for the next: its memory, and what is forgotten of it."""

from __future__ import annotations

import pytest
import torch

from gvr_topk import TopkState
from gvr_topk.constants import STATE_FLOATS, STATE_UNKNOWN

SLOTS, K = 5, 7


def used(keep_indices: bool = True) -> TopkState:
    """A state whose every number some step has written."""
    state = TopkState(SLOTS, K, keep_indices=keep_indices)
    state.words.fill_(70.0)
    if state.indices is not None:
        state.indices.fill_(3)
    return state


def forgotten(state: TopkState) -> list[int]:
    """Slots that are as new; the others must be as `used` left them."""
    new = []
    for slot in range(state.slots):
        parts = [state.words[slot] == STATE_UNKNOWN]
        kept = [state.words[slot] == 70.0]
        if state.indices is not None:
            parts.append(state.indices[slot] == -1)
            kept.append(state.indices[slot] == 3)
        is_new = all(bool(part.all()) for part in parts)
        assert is_new or all(bool(part.all()) for part in kept)
        if is_new:
            new.append(slot)
    return new


@pytest.mark.parametrize("keep_indices", [True, False])
def test_a_new_state_knows_nothing(keep_indices: bool) -> None:
    state = TopkState(SLOTS, K, keep_indices=keep_indices)
    assert (state.slots, state.k) == (SLOTS, K)
    assert state.words.shape == (SLOTS, STATE_FLOATS) and state.words.dtype == torch.float32
    assert state.words.is_contiguous() and (state.words == STATE_UNKNOWN).all()
    assert (state.indices is not None) == keep_indices
    if state.indices is not None:
        assert state.indices.shape == (SLOTS, K) and state.indices.dtype == torch.int32
        assert (state.indices == -1).all()


def test_memory_of_a_slot() -> None:
    assert TopkState(SLOTS, K).nbytes == SLOTS * (16 + 4 * K)
    assert TopkState(SLOTS, K, keep_indices=False).nbytes == SLOTS * 16


def test_it_lies_where_it_is_asked_for() -> None:
    state = TopkState(SLOTS, K, "meta")
    assert state.indices is not None
    assert state.words.device.type == state.indices.device.type == "meta"


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        (2, [2]),
        (-1, [4]),
        ([0, 3], [0, 3]),
        ((4, 4), [4]),
        ([], []),
        (range(1, 3), [1, 2]),
        (torch.tensor([1, 4]), [1, 4]),
        (torch.tensor([], dtype=torch.int64), []),
    ],
)
@pytest.mark.parametrize("keep_indices", [True, False])
def test_reset(slots: object, expected: list[int], keep_indices: bool) -> None:
    state = used(keep_indices)
    addresses = [state.words.data_ptr()]
    state.reset(slots)  # type: ignore[arg-type]
    assert forgotten(state) == expected
    assert addresses == [state.words.data_ptr()]


@pytest.mark.parametrize("slots", [SLOTS, -SLOTS - 1, [0, SLOTS]])
def test_reset_of_a_slot_that_does_not_exist(slots: object) -> None:
    with pytest.raises(IndexError):
        used().reset(slots)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep_indices", [True, False])
def test_a_state_of_tensors_shares_their_memory(keep_indices: bool) -> None:
    words = torch.zeros(3, SLOTS, STATE_FLOATS)
    indices = torch.zeros(3, SLOTS, K, dtype=torch.int32) if keep_indices else None
    state = TopkState.of(words[1], None if indices is None else indices[1], K)
    assert (state.slots, state.k) == (SLOTS, K)
    state.reset()
    assert (words[1] == STATE_UNKNOWN).all() and (words[[0, 2]] == 0).all()
    if indices is not None:
        assert (indices[1] == -1).all() and (indices[[0, 2]] == 0).all()


def test_it_says_what_it_is() -> None:
    assert repr(TopkState(SLOTS, K)) == "TopkState(5, 7, 'cpu')"
    assert repr(TopkState(SLOTS, K, keep_indices=False)) == "TopkState(5, 7, 'cpu', keep_indices=False)"


@pytest.mark.parametrize(
    ("slots", "k", "message"),
    [(0, 1, "slots: wanted at least 1, got 0"), (1, -2, "k: wanted at least 1, got -2")],
)
def test_bad_sizes_are_named(slots: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        TopkState(slots, k)
