"""No row ever reads the hint of another request, whatever the engine does between steps."""

from __future__ import annotations

import copy
import pickle
import re
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gvr_topk.contract import row_lengths
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.ops import indexer_topk_decode
from gvr_topk.request_slots import (
    IDLE_STEPS,
    PINNED_BUFFERS,
    PINNED_GROUPS,
    RequestSlots,
    SlotsFullError,
    _PinnedBuffers,
)

K, WIDTH = 3, 11


def test_shapes_and_initial_values() -> None:
    slots = RequestSlots(2, 3, K, max_rows=5)
    assert slots.indices.shape == (2, 3, K) and slots.indices.dtype == torch.int32
    assert slots.words.shape == (2, 3, 4) and slots.words.dtype == torch.float32
    assert slots.row_slot.shape == (5,) and slots.row_slot.dtype == torch.int32
    assert (slots.indices == -1).all() and (slots.words == -1).all() and (slots.row_slot == -1).all()


def test_without_k_only_the_state_is_kept() -> None:
    slots = RequestSlots(2, 2, None, max_rows=4)
    assert slots.indices is None and slots.layer(1).indices is None
    slot = slots.admit("a")
    slots.words.fill_(70.0)
    assert not slots.seed(0, "a", torch.arange(K)) and (slots.words == 70).all()
    assert not RequestSlots(1, 1, K).seed(0, "ghost", torch.arange(K))
    slots.release("a")
    assert slots.admit("b") == slot
    assert (slots.words[:, slot] == -1).all() and (slots.words[:, 1 - slot] == 70).all()


class Watch(TorchDispatchMode):
    """Lists the operators that write to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self.written.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("k", [None, K])
def test_requests_that_arrive_together_are_cleared_together(k: int | None) -> None:
    slots = RequestSlots(2, 40, k)
    slots.set_rows(list(range(40)))
    slots.words.fill_(70.0)
    if slots.indices is not None:
        slots.indices.fill_(7)
    for request in (3, 4, 20, 21, 39):  # their slots leave gaps
        slots.release(request)
    with Watch() as watch:
        rows = slots.set_rows([100, 0, 101, None, 102, 1])
    clear = ["aten::index_fill_.int_Scalar"] * (1 if k is None else 2)
    assert watch.written == ["aten::copy_", *clear, "aten::copy_"]
    assert rows.tolist() == [3, 0, 4, -1, 20, 1]
    cleared = torch.zeros(40, dtype=torch.bool)
    cleared[[3, 4, 20]] = True
    assert (slots.words[:, cleared] == -1).all() and (slots.words[:, ~cleared] == 70).all()
    if slots.indices is not None:
        assert (slots.indices[:, cleared] == -1).all() and (slots.indices[:, ~cleared] == 7).all()


def test_one_copy_clears_a_new_batch_and_says_its_rows() -> None:
    slots = RequestSlots(1, 4, None)
    slots.words.fill_(70.0)
    with Watch() as watch:
        rows = slots.set_rows(["a", "b", "c"])
    assert watch.written == ["aten::copy_", "aten::index_fill_.int_Scalar"]
    assert rows.tolist() == [0, 1, 2] and slots.row_slot.tolist() == [0, 1, 2, -1]
    assert (slots.words[:, :3] == -1).all() and (slots.words[:, 3] == 70).all()


class LateDevice:
    """A GPU that runs copies and events when it is told to, and the calls of `torch` that lead to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = torch.device("cuda", 1)
        self.queue: list[Callable[[], None]] = []
        self.arrived: list[list[int]] = []
        self.capturing = False
        self.graph: list[Callable[[], None]] = []
        self.allocated = 0  # groups of pinned buffers
        empty, late = torch.empty, self

        class Event:
            def __init__(self) -> None:
                self.pending = 0

            def query(self) -> bool:
                assert not late.capturing, "CUDA refuses this while a stream is being captured"
                return self.pending == 0

            def record(self, stream: object) -> None:
                assert not late.capturing and stream == ("stream of", late.device)
                self.pending += 1
                late.queue.append(self._reach)

            def _reach(self) -> None:
                self.pending -= 1

        def count_pinned(*shape: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            self.allocated += pin_memory
            return empty(*shape, **options)

        monkeypatch.setattr(torch, "empty", count_pinned)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        """Stand in for the method of `row_slot`: what arrives is what the source holds by then."""
        assert non_blocking
        (self.graph if self.capturing else self.queue).append(lambda: self.arrived.append(source.tolist()))

    def run(self, steps: int) -> None:
        """Run that many of the enqueued copies and events."""
        for step in [self.queue.pop(0) for _ in range(min(steps, len(self.queue)))]:
            step()


@pytest.mark.parametrize(
    ("ahead", "groups"), [(1, 2), (PINNED_BUFFERS - 1, 2), (PINNED_BUFFERS, 3), (3 * PINNED_BUFFERS, 5)]
)
def test_a_pinned_buffer_is_not_written_while_a_copy_from_it_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, ahead: int, groups: int
) -> None:
    late = LateDevice(monkeypatch)
    buffers = _PinnedBuffers(2)
    steps = 10 * PINNED_BUFFERS
    for step in range(steps):
        buffers.copy(array("i", [step, -step]), late)
        while len(late.arrived) < step + 1 - ahead:
            late.run(1)
    late.run(len(late.queue))
    assert late.arrived == [[step, -step] for step in range(steps)]
    assert late.allocated == groups


def test_a_captured_copy_keeps_its_pinned_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateDevice(monkeypatch)
    buffers = _PinnedBuffers(1)
    late.capturing = True
    buffers.copy(array("i", [77]), late)
    late.capturing = False
    steps = 3 * PINNED_BUFFERS
    for step in range(steps):
        buffers.copy(array("i", [step]), late)
        late.run(2)
    for replayed in late.graph * 2:
        replayed()
    assert late.arrived == [*([step] for step in range(steps)), [77], [77]]
    assert late.allocated == PINNED_GROUPS + 1


def test_a_gpu_gets_its_rows_through_pinned_buffers_and_a_copy_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LateDevice(monkeypatch)
    slots = RequestSlots(1, 4, None, max_rows=3)
    late.device = slots.row_slot.device
    assert late.allocated == 0
    slots.device = torch.device("cuda")
    monkeypatch.setattr(_PinnedBuffers._allocate, "__defaults__", (1,))  # an event behind each copy
    with torch.inference_mode():  # where engines may run; the buffers serve outside of it, too
        buffers = copy.deepcopy(slots)._pinned
    slots._pinned = buffers
    for batch, rows in (("a", [0, -1, -1]), ("ba", [1, 0, -1]), ("cba", [2, 1, 0]), ("b", [1, -1, -1])):
        slots.set_rows(list(batch))
        assert slots.row_slot.tolist() == rows and len(late.queue) == 1
        late.run(1)
    assert late.allocated == PINNED_GROUPS


def test_accepted_rows_reach_the_slots_of_all_layers() -> None:
    slots = RequestSlots(2, 3, None, max_rows=4)
    rows = slots.set_rows(["a", None, "b"])
    left = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)
    slots.accept(left, rows, torch.tensor([1, 2, 2], dtype=torch.int32))
    assert torch.equal(slots.words[:, slots.slot_of("a")], left[:, 0])
    assert torch.equal(slots.words[:, slots.slot_of("b")], left[:, 5])
    assert (slots.words[:, 2] == -1).all()
    slots.release("a")
    slots.admit("c")
    assert slots.slot_of("c") == 0 and (slots.words[:, 0] == -1).all()


def test_idle_requests_lose_their_slot_in_the_end_and_no_sooner() -> None:
    slots = RequestSlots(1, 8, K)
    slots.set_rows(["gone", "stays"])
    assert IDLE_STEPS == 512
    for _ in range(IDLE_STEPS):
        slots.set_rows(["stays"])
    assert "gone" in slots
    slots.set_rows(["stays"])
    assert "gone" not in slots and "stays" in slots and slots.evicted == 0
    assert slots.admit("new") == 0


def test_requests_that_never_get_a_row_lose_their_slot_too() -> None:
    slots = RequestSlots(1, 3, K)
    slots.admit("waits")
    for _ in range(IDLE_STEPS):
        slots.set_rows(["a"])
    assert "waits" in slots
    slots.set_rows(["a"])
    assert "waits" not in slots and slots.evicted == 0
    slots.admit("b")
    slots.admit("c")
    slots.set_rows(["a", "d"])
    assert "b" not in slots and "c" in slots and slots.evicted == 1


@pytest.mark.parametrize(
    ("batches", "left"),
    [
        (["abc", "a", "d"], "acd"),
        (["abc", "a", "d", "ed"], "aed"),
        (["a", "ac", "de"], "cde"),  # those of the last batch go after those that waited longer
    ],
)
def test_vanished_requests_lose_their_slot_oldest_use_first(batches: list[str], left: str) -> None:
    slots = RequestSlots(1, 3, K)
    for batch in batches:
        slots.set_rows(list(batch))
    assert set(slots._slots) == set(left) and slots.evicted == len(set("".join(batches))) - 3


def test_full_names_request_and_slots() -> None:
    slots = RequestSlots(1, 2, K)
    slots.admit("a")
    slots.admit("b")
    with pytest.raises(SlotsFullError, match="request_id: wanted a free slot for 'c', got none: all 2 slots"):
        slots.admit("c")
    assert slots.try_admit("c") == -1 and "c" not in slots
    assert slots.refused == 2 and slots.admitted == 2


def test_rows_that_stay_are_not_written_again() -> None:
    slots = RequestSlots(1, 3, None, max_rows=4)
    slots.set_rows(["a", "b"])
    slots.row_slot[3] = 77
    assert slots.set_rows(["a", "b"]).tolist() == [0, 1] and int(slots.row_slot[3]) == 77
    slots.set_rows(["a", "c"])
    assert slots.row_slot.tolist() == [0, 2, -1, -1]
    slots.set_rows([])
    assert slots.row_slot.tolist() == [-1] * 4


def test_rows_can_be_repeated_until_a_request_leaves() -> None:
    slots = RequestSlots(1, 3, None, max_rows=4)
    assert slots.repeat_rows() is None
    rows = slots.set_rows(["a", None, "b"])
    assert slots.repeat_rows() is rows and rows.tolist() == [0, -1, 1]
    slots.release("unknown")
    assert slots.repeat_rows() is rows
    slots.release("a")
    assert slots.repeat_rows() is None
    assert slots.set_rows(["b"]).tolist() == [1]


def test_requests_of_repeated_rows_are_not_idle() -> None:
    slots = RequestSlots(1, 3, None)
    slots.set_rows(["gone"])
    slots.set_rows(["a"])
    for _ in range(IDLE_STEPS - 2):
        slots.repeat_rows()
    slots.set_rows(["a"])
    assert "gone" in slots
    slots.repeat_rows()
    slots.set_rows(["b"])
    assert "a" in slots and "gone" not in slots
    for _ in range(IDLE_STEPS + 1):
        slots.repeat_rows()
    slots.set_rows(["c"])
    assert "a" not in slots and "b" in slots


def test_retain_releases_the_others() -> None:
    slots = RequestSlots(1, 3, K)
    slots.set_rows(["a", "b", "c"])
    slots.retain(["b", "unknown"])
    assert len(slots) == 1 and "b" in slots
    slots.release("never seen")


@pytest.mark.parametrize(
    ("columns", "expected"), [(5, [8, 7, 6]), (3, [8, 7, 6]), (2, [8, 7, -1]), (0, [-1] * 3)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seed_copies_and_pads(columns: int, expected: list[int], dtype: torch.dtype) -> None:
    slots = RequestSlots(2, 2, K)
    slot = slots.admit("a")
    slots.indices[1, slot] = 99
    slots.words[1, slot] = 0.9
    assert slots.seed(1, "a", torch.tensor([8, 7, 6, 5, 4], dtype=dtype)[:columns])
    assert slots.indices[1, slot].tolist() == expected
    assert (slots.words[1, slot] == -1).all()
    assert (slots.indices[0] == -1).all() and (slots.indices[1, 1 - slot] == -1).all()


DEVICE = "wanted a torch.device or the name of one"
NEITHER = "wanted ids that are neither flags nor fractions"
HASHABLE = r"wanted hashable ids, such as those of tolist\(\)"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: p.set_rows(["a"] * 3), "request_ids: wanted at most max_rows = 2 rows, got 3"),
        (lambda p: p.set_rows(["a"], next_n=3), "request_ids: wanted at most max_rows = 2 rows, got 3"),
        (lambda p: p.set_rows(["a"], next_n=0), "next_n: wanted at least 1, got 0"),
        (lambda p: p.set_rows(["a"], pad_rows=-1), "pad_rows: wanted at least 0, got -1"),
        (lambda p: p.set_rows(["a"], next_n="1"), "next_n: wanted an integer, got '1'"),
        (lambda p: p.set_rows(["a"], pad_rows=0.5), "pad_rows: wanted an integer, got 0.5"),
        (lambda p: p.seed(0, "a", torch.arange(3)[None]), r"row_indices: wanted shape \[any\], got \[1, 3\]"),
        (lambda p: p.seed(0, "a", [1]), "row_indices: wanted a Tensor, got list"),
        (lambda p: p.seed(0, "a", torch.zeros(3)), "row_indices: wanted an integer dtype, got float32"),
        (lambda p: p.seed(1, "a", torch.arange(3)), "layer: wanted 0 to 0, got 1"),
        (lambda p: p.layer(-1), "index: wanted 0 to 0, got -1"),
        (lambda p: p.layer(1), "index: wanted 0 to 0, got 1"),
        (lambda p: RequestSlots(1, "2", 1), "num_slots: wanted an integer, got '2'"),
        (lambda p: RequestSlots(1, 0, 1), "num_slots: wanted 1 to 67108864, got 0"),
        (lambda p: RequestSlots(1, 1, 0), "k: wanted 1 to 2097152, got 0"),
        (lambda p: RequestSlots(0, 1, 1), "num_layers: wanted 1 to 67108864, got 0"),
        (lambda p: RequestSlots(1, 1, 1, max_rows=0), "max_rows: wanted 1 to 67108864, got 0"),
        (lambda p: RequestSlots(1, 1, 1, max_rows=2**70), f"max_rows: wanted 1 to 67108864, got {2**70}"),
        (lambda p: RequestSlots(2**70, 1, 1), f"num_layers: wanted 1 to 67108864, got {2**70}"),
        (lambda p: RequestSlots(1, 2**70, 1), f"num_slots: wanted 1 to 67108864, got {2**70}"),
        (lambda p: RequestSlots(1, 1, 2**21 + 1), "k: wanted 1 to 2097152, got 2097153"),
        (lambda p: RequestSlots(1, True, 1), "num_slots: wanted an integer, got True"),
        (lambda p: RequestSlots(1, 1, 1, device="nope"), f"device: {DEVICE}, got 'nope'"),
        (lambda p: RequestSlots(1, 1, 1, device=None), f"device: {DEVICE}, got None"),
        (lambda p: p.layer([0]), r"index: wanted an integer, got \[0\]"),
        (lambda p: p.set_rows(None), "request_ids: wanted a sequence of ids, got NoneType"),
        (lambda p: p.set_rows(5), "request_ids: wanted a sequence of ids, got int"),
        (lambda p: p.set_rows(n for n in "a"), "request_ids: wanted a sequence of ids, got generator"),
        (lambda p: p.set_rows(torch.tensor([1])), "request_ids: wanted a sequence of ids, got Tensor"),
        (lambda p: p.set_rows("abc"), "request_ids: wanted a sequence of ids, got str"),
        (lambda p: p.retain(b"abc"), "request_ids: wanted a sequence of ids, got bytes"),
        (lambda p: p.set_rows([1, True]), f"request_ids: {NEITHER}, got True"),
        (lambda p: p.set_rows([1, 1.0]), f"request_ids: {NEITHER}, got 1.0"),
        (lambda p: p.set_rows([None, np.float64(2)]), rf"request_ids: {NEITHER}, got np.float64\(2.0\)"),
        (lambda p: p.try_admit(True), f"request_id: {NEITHER}, got True"),
        (lambda p: p.admit(None), "request_id: wanted the id of a request, got None"),
        (lambda p: p.try_admit(None), "request_id: wanted the id of a request, got None"),
        (lambda p: p.retain(torch.tensor(1)), "request_ids: wanted a sequence of ids, got Tensor"),
        (lambda p: p.retain(None), "request_ids: wanted a sequence of ids, got NoneType"),
        (lambda p: p.retain([["a"]]), "request_ids: wanted hashable ids, got list"),
        (lambda p: p.set_rows(list(torch.tensor([1, 2]))), f"request_ids: {HASHABLE}, got Tensor"),
        (lambda p: p.admit(torch.tensor(1)), f"request_id: {HASHABLE}, got Tensor"),
        (lambda p: p.admit([1]), "request_id: wanted hashable ids, got list"),
        (lambda p: p.release([]), "request_id: wanted hashable ids, got list"),
        (lambda p: p.slot_of({}), "request_id: wanted hashable ids, got dict"),
        (lambda p: p.seed(0, [], torch.arange(3)), "request_id: wanted hashable ids, got list"),
    ],
)
def test_bad_arguments_are_named(call, text: str) -> None:  # type: ignore[no-untyped-def]
    called = call.__code__.co_names[0]
    name = re.escape("gvr_topk.RequestSlots" + ("" if called == "RequestSlots" else f".{called}"))
    with pytest.raises(ValueError, match=f"^{name}: {text}$"):
        call(RequestSlots(1, 2, K))


def test_bytes_match_the_allocation() -> None:
    assert RequestSlots(5, 64, 2048, max_rows=256).nbytes == 4 * (5 * 64 * (4 + 2048) + 256)
    # TensorRT-LLM's default of 2,048 requests, the 61 layers of DeepSeek-V3.2: under two MiB.
    assert RequestSlots(61, 2048, None).nbytes == 4 * (61 * 2048 * 4 + 2048) < 2**21


REQUESTS = st.integers(0, 7)
STEP = st.fixed_dictionaries(
    {
        "leave": st.lists(REQUESTS, max_size=3),
        "prefill": st.lists(REQUESTS, max_size=2),
        "batch": st.lists(st.one_of(st.none(), REQUESTS), max_size=6),
        "next_n": st.integers(1, 3),
        "pad": st.integers(0, 2),
        "retain": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


@settings(max_examples=150, deadline=None)
@given(schedule=st.lists(STEP, max_size=8), num_slots=st.integers(1, 5))
def test_schedules_against_a_dictionary(schedule: list[dict], num_slots: int) -> None:
    layers = 2
    slots = RequestSlots(layers, num_slots, K, max_rows=6 * 3 + 2)
    model: dict[tuple[int, int], list[int]] = {}  # (layer, request) -> its last top-k
    for step in schedule:
        generator = torch.Generator().manual_seed(step["seed"])
        for request in step["leave"]:
            slots.release(request)
        if step["retain"]:
            slots.retain([request for request in step["batch"] if request is not None])
        for request in step["prefill"]:
            if slots.try_admit(request) >= 0:
                for layer in range(layers):
                    row = torch.randint(0, WIDTH, (K,), generator=generator)
                    assert slots.seed(layer, request, row)
                    model[layer, request] = row.tolist()
        _forget(model, slots)

        batch, next_n, pad = step["batch"], step["next_n"], step["pad"]
        row_slot = slots.set_rows(batch, next_n, pad)
        # A request can lose its slot and be admitted again within one call only if it was evicted,
        # and the batch itself is never evicted; so what the model still holds must be intact.
        _forget(model, slots)
        rows = len(batch) * next_n
        owners = [batch[row // next_n] for row in range(rows)]
        used = [slot for slot in row_slot[:rows:next_n].tolist() if slot >= 0]
        assert len(set(used)) == len(used), "two requests write one slot"
        assert row_slot[rows:].tolist() == [-1] * pad
        for layer in range(layers):
            view = slots.layer(layer)
            for owner, slot in zip(owners, row_slot.tolist(), strict=False):
                if slot >= 0:
                    assert slot == slots.slot_of(owner)
                    assert view.indices[slot].tolist() == model.get((layer, owner), [-1] * K)
                    assert (layer, owner) in model or (view.words[slot] == -1).all()
            if not batch:
                continue
            untouched = view.indices.clone()
            logits = torch.randn(rows + pad, WIDTH, generator=generator)
            lengths = torch.randint(1, WIDTH + 1, (len(batch),), generator=generator, dtype=torch.int32)
            if pad % next_n == 0:  # the op takes whole requests only; engines pad the same way
                padded = torch.cat([lengths, lengths.new_zeros(pad // next_n)])
                call = logits, padded, row_slot
            else:
                call = logits[:rows], lengths, row_slot[:rows]
            got = indexer_topk_decode(call[0], call[1], K, next_n=next_n, state=view, row_slot=call[2])
            expected = sorted_topk(call[0], row_lengths(call[1], call[0].shape[0], next_n), K)
            assert torch.equal(got, expected)
            for place in range(len(batch)):
                last = place * next_n + next_n - 1
                slot = int(call[2][last])
                if slot >= 0:
                    model[layer, owners[last]] = expected[last].tolist()
                    untouched[slot] = expected[last]
            assert torch.equal(view.indices, untouched), "a slot outside the batch changed"


def _forget(model: dict[tuple[int, int], list[int]], slots: RequestSlots) -> None:
    """A request without a slot has no hint; when it returns it starts cold."""
    for key in [key for key in model if key[1] not in slots]:
        del model[key]


def test_a_batch_that_is_refused_changes_nothing() -> None:
    slots = RequestSlots(1, 3, K)
    rows = slots.set_rows(["a", "b"]).clone()
    message = r"^gvr_topk\.RequestSlots\.set_rows: request_ids: wanted hashable ids, got list$"
    with pytest.raises(ValueError, match=message):
        slots.set_rows(["c", ["x"]])
    assert "c" not in slots and torch.equal(slots.repeat_rows(), rows)
    assert torch.equal(slots.set_rows(["a", "b"]), rows) and slots.admitted == 2


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_does_not_count(device: str) -> None:
    with torch.device(device):
        slots = RequestSlots(1, 2, K)
        rows = slots.set_rows(["a", "b"])
        assert rows.device.type == slots.words.device.type == slots.layer(0).indices.device.type == "cpu"
    assert rows.tolist() == [0, 1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda slots: pickle.loads(pickle.dumps(slots))])
def test_copies_share_memory_with_their_own_views_alone(copied) -> None:  # type: ignore[no-untyped-def]
    slots = RequestSlots(2, 3, K, max_rows=4)
    slots.set_rows(["a", "b"])
    slots.layer(1).words[0] = 0.5
    twin = copied(slots)
    assert torch.equal(twin.words, slots.words) and twin.slot_of("b") == 1
    twin.layer(1).words[0] = 0.75
    twin.layer(1).indices[0] = 7
    assert (twin.words[1, 0] == 0.75).all() and (twin.indices[1, 0] == 7).all()
    assert (slots.words[1, 0] == 0.5).all() and (slots.indices[1, 0] == -1).all()
    repeated = twin.repeat_rows()
    assert repeated.tolist() == [0, 1] and repeated.data_ptr() == twin.row_slot.data_ptr()
    assert twin.set_rows(["b", "c"]).tolist() == [1, 2] == repeated.tolist()
    assert slots.row_slot.tolist() == [0, 1, -1, -1]
