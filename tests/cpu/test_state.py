"""What one step leaves for the next: its memory, and what is forgotten of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gvr_topk import RequestSlots, TopkState
from gvr_topk.arguments import Checks
from gvr_topk.constants import STATE_FLOATS, STATE_UNKNOWN
from gvr_topk.ops import indexer_topk_decode
from gvr_topk.state import accept_rows

SLOTS, K = 5, 7
NO_SLOTS = torch.tensor([-1, 3, SLOTS, -(2**31), 2**31 - 1, 1])  # but for 3 and 1


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
    """The default device does not count."""
    for given, device in (("meta", "cpu"), ("cpu", "meta")):
        with torch.device(given):
            state = TopkState(SLOTS, K, device) if device == "meta" else TopkState(SLOTS, K)
        assert state.indices is not None
        assert state.words.device.type == state.indices.device.type == device


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        (2, [2]),
        ([0, 3], [0, 3]),
        ((4, 4), [4]),
        ([], []),
        (range(1, 3), [1, 2]),
        (torch.tensor([1, 4]), [1, 4]),
        (torch.tensor([], dtype=torch.int64), []),
        *((NO_SLOTS.to(dtype), [1, 3]) for dtype in (torch.int32, torch.int64)),
    ],
)
@pytest.mark.parametrize("keep_indices", [True, False])
def test_reset(slots: object, expected: list[int], keep_indices: bool) -> None:
    state = used(keep_indices)
    addresses = [state.words.data_ptr()]
    state.reset(slots)  # type: ignore[arg-type]
    assert forgotten(state) == expected
    assert addresses == [state.words.data_ptr()]


@pytest.mark.parametrize(
    ("slots", "got"),
    [
        (SLOTS, "0 to 4, got 5"),
        (-1, "0 to 4, got -1"),
        ([0, SLOTS], "0 to 4, got 5"),
        (1.0, "an integer, got 1.0"),
        ("1", "an integer, got '1'"),
        (torch.tensor([1.0]), "an integer dtype, got float32"),
        (torch.tensor([True]), "an integer dtype, got bool"),
        (torch.tensor([[1]]), r"shape \[any\], got \[1, 1\]"),
        (torch.tensor([1], device="meta"), "a tensor on cpu, got meta"),
    ],
)
def test_reset_refuses_what_names_no_slot(slots: object, got: str) -> None:
    state = used()
    with pytest.raises(ValueError, match=rf"^gvr_topk\.TopkState\.reset: slots: wanted {got}$"):
        state.reset(slots)  # type: ignore[arg-type]
    assert forgotten(state) == []


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
    ("name", "value", "wanted"),
    [
        *(("slots", slots, "1 to 67108864") for slots in (0, 2**70)),
        *(("k", k, "1 to 2097152") for k in (-2, 2**21 + 1)),
        *(("k", k, "an integer") for k in (True, 6.5)),
        ("slots", "4", "an integer"),
        *(("device", device, "a torch.device or the name of one") for device in ("nope", None, 1.5)),
        ("keep_indices", "no", "true or false"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=rf"^gvr_topk\.TopkState: {name}: wanted {wanted}, got {value!r}$"):
        TopkState(**{"slots": 1, "k": 1} | {name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU")
@pytest.mark.parametrize("make", [TopkState, functools.partial(RequestSlots, 1)])
def test_a_device_that_torch_lacks_is_named(make: Callable[..., object]) -> None:
    wanted = "device: wanted a device that torch can .*, got 'cuda': "
    with pytest.raises(ValueError, match=rf"^gvr_topk\.\w+: {wanted}"):
        make(1, 8, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1],), "words: wanted a Tensor, got list"),
        ((None,), "words: wanted a Tensor, got NoneType"),
        ((torch.zeros(2, 3),), r"words: wanted shape \[any, 4\], got \[2, 3\]"),
        ((torch.zeros(2, 4).double(),), "words: wanted dtype float32, got float64"),
        ((torch.zeros(2, 8)[:, :4],), r"words: wanted contiguous rows, got strides \(8, 1\)"),
        (
            (torch.zeros(9)[1:].view(2, 4),),
            "words: wanted an address that is a multiple of 16, got one that is not",
        ),
        ((torch.zeros(2, 4), [1]), "indices: wanted a Tensor, got list"),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), "indices: wanted dtype int32, got float32"),
        ((torch.zeros(2, 4), torch.zeros(2, 4).int(), 5), r"indices: wanted shape \[2, 5\], got \[2, 4\]"),
        ((torch.zeros(2, 4), torch.zeros(3, 4).int()), r"indices: wanted shape \[2, any\], got \[3, 4\]"),
        (
            (torch.zeros(2, 4), torch.zeros(2, 4).int().to("meta")),
            "indices: wanted a tensor on cpu, got meta",
        ),
        ((torch.zeros(2, 4), None, 0), "k: wanted 1 to 2097152, got 0"),
    ],
)
def test_tensors_that_are_no_state_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^gvr_topk\.TopkState\.of: {message}$"):
        TopkState.of(*arguments)


def test_a_state_of_positions_knows_how_many_there_are() -> None:
    assert TopkState.of(torch.zeros(2, 4), torch.zeros(2, 9, dtype=torch.int32)).k == 9


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_small_integers_count_accepted_rows_of_many(dtype: torch.dtype) -> None:
    """The number of rows of a request need not fit the integers that count them."""
    next_n = 300
    state, rows = used(), left(2, next_n)
    state.accept(rows, torch.tensor([1, 3], dtype=dtype), torch.tensor([100, 2], dtype=dtype))
    assert torch.equal(state.words[1], rows[99]) and torch.equal(state.words[3], rows[next_n + 1])


def left(requests: int, next_n: int, layers: tuple[int, ...] = ()) -> torch.Tensor:
    """What rows leave, each something else."""
    shape = (*layers, requests * next_n, STATE_FLOATS)
    return 100.0 + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_the_last_accepted_row_is_taken_over(next_n: int, dtype: torch.dtype) -> None:
    for count in range(1, next_n + 1):
        state, rows = used(), left(3, next_n)
        state.accept(
            rows, torch.tensor([4, 0, 2], dtype=dtype), torch.tensor([count, 1, next_n], dtype=dtype)
        )
        taken = (count - 1, next_n, 3 * next_n - 1)
        for slot, row in zip((4, 0, 2), taken, strict=True):
            assert torch.equal(state.words[slot], rows[row])
        assert (state.words[[1, 3]] == 70.0).all()
        assert state.indices is not None and (state.indices == 3).all()


@pytest.mark.parametrize(("count", "row"), [(0, 0), (-9, 0), (5, 2), (2**31 - 1, 2), (-(2**31), 0)])
def test_numbers_of_rows_out_of_range_count_as_the_nearest(count: int, row: int) -> None:
    state, rows = used(), left(2, 3)
    state.accept(rows, torch.tensor([1, 3]), torch.tensor([count, 2], dtype=torch.int32))
    assert torch.equal(state.words[1], rows[row]) and torch.equal(state.words[3], rows[4])


@pytest.mark.parametrize("no_slot", [-1, -2, -SLOTS - 1, SLOTS, SLOTS + 1, 2**31 - 1, -(2**31)])
def test_requests_without_a_slot_write_nothing(no_slot: int) -> None:
    state, rows = used(), left(3, 2)
    slots = torch.tensor([no_slot, 1, no_slot], dtype=torch.int32)
    state.accept(rows, slots, torch.tensor([2, 2, 1]))
    assert torch.equal(state.words[1], rows[3]) and (state.words[[0, 2, 3, 4]] == 70.0).all()


def test_a_row_that_leaves_nothing_leaves_the_slot_as_it_is() -> None:
    """As the op does with a row that is no longer than k."""
    state, rows = used(), left(2, 2)
    rows[1], rows[2] = STATE_UNKNOWN, float("nan")
    state.accept(rows, torch.tensor([0, 1]), torch.tensor([2, 1]))
    assert (state.words[0] == 70.0).all() and state.words[1].isnan().all()


def test_no_requests_and_shapes_that_do_not_belong_together() -> None:
    state = used()
    nothing = torch.empty(0, dtype=torch.int64)
    state.accept(left(0, 2), nothing, nothing)
    assert (state.words == 70.0).all()
    two = torch.tensor([0, 1])
    for name, wrong, said in (
        ("accepted", two[:1], r"shape \[2\], got \[1\]"),
        ("next_state", left(3, 1), "a multiple of 2 rows, got 3"),
        ("next_state", [1.0], "a Tensor, got list"),
        ("next_state", left(2, 2)[0], r"shape \[any, 4\], got \[4\]"),
        ("next_state", left(2, 2)[:, :3], r"shape \[any, 4\], got \[4, 3\]"),
        ("next_state", left(2, 2).double(), "dtype float32, got float64"),
        ("slots", two.float(), "an integer dtype, got float32"),
        ("slots", two[None], r"shape \[any\], got \[1, 2\]"),
        ("accepted", None, "a Tensor, got NoneType"),
        ("accepted", two.to("meta"), "a tensor on cpu, got meta"),
    ):
        arguments = {"next_state": left(2, 2), "slots": two, "accepted": two, name: wrong}
        with pytest.raises(ValueError, match=rf"^gvr_topk\.TopkState\.accept: {name}: wanted {said}$"):
            state.accept(**arguments)  # type: ignore[arg-type]
    assert (state.words == 70.0).all()


def test_one_layer_of_a_larger_buffer_and_all_at_once() -> None:
    rows, slots, accepted = left(2, 3, (4,)), torch.tensor([3, -1]), torch.tensor([2, 3])
    words = torch.full((4, SLOTS, STATE_FLOATS), 70.0)
    apart = words.clone()
    address = words.data_ptr()
    accept_rows(Checks(), words, rows, slots, accepted)
    for layer in range(4):
        TopkState.of(apart[layer], None, K).accept(rows[layer], slots, accepted)
    assert words.data_ptr() == address and torch.equal(words, apart)
    assert torch.equal(words[:, 3], rows[:, 1]) and (words[:, :3] == 70.0).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_accepted_row_leaves_what_it_leaves_alone(count: int) -> None:
    next_n, length = 3, 40
    scores = torch.randn(next_n, 64, generator=torch.Generator().manual_seed(7))
    drafts, alone = TopkState(1, K, keep_indices=False), TopkState(1, K, keep_indices=False)
    next_state = torch.empty(next_n, STATE_FLOATS)
    lengths = torch.tensor([length], dtype=torch.int32)
    indexer_topk_decode(scores, lengths, K, next_n=next_n, state=drafts, next_state=next_state)
    assert (drafts.words == STATE_UNKNOWN).all()
    drafts.accept(next_state, torch.tensor([0]), torch.tensor([count]))
    indexer_topk_decode(scores[count - 1 : count], lengths - next_n + count, K, state=alone)
    assert torch.equal(drafts.words, alone.words) and alone.words[0, 0] != STATE_UNKNOWN
