"""State between decode steps, kept by request: 16 bytes per layer, and the chosen positions where wanted.

The batch of an engine shifts between steps: requests finish, arrive and change rows, and CUDA graphs
add padding rows. A buffer indexed by row would hand one request the positions of another. Here a
request owns a slot for its lifetime, and a small device tensor says which slot each row uses. A slot
is cleared when it changes hands. A wrong hint could only cost time, never the result.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.arguments import Checks
from gvr_topk.constants import MAX_ROWS, MAX_WIDTH, STATE_FLOATS, STATE_UNKNOWN
from gvr_topk.state import TopkState, accept_rows

NAME = "gvr_topk.RequestSlots"
"""What every error message of the slots begins with, followed by the name of the method."""

NO_SLOT = -1
"""Slot of a row without a hint and without write-back."""

IDLE_STEPS = 512
"""Steps without a row after which a request loses its slot; no pipeline has as many batches in flight.

Engines drop requests without saying so. A preempted request that comes back later starts without a hint.
"""

PINNED_BUFFERS, PINNED_GROUPS = 16, 2
"""Pinned buffers of a group, and groups to begin with. A host that is fewer copies than a group ahead of the
device allocates no more. An event for each copy would take the host longer than the copy."""


class SlotsFullError(RuntimeError):
    """Every slot belongs to a request that was not released."""


_PLAIN = {int, str, type(None)}
"""Types of ids that need no further check."""


@functools.cache
def _checks(method: str) -> Checks:
    """Return the checks of a method, whose name its messages begin with."""
    return Checks(f"{NAME}.{method}")


def _check_ids(checks: Checks, argument: str, request_ids: Collection[Hashable | None]) -> None:
    """Refuse ids that cannot tell requests apart."""
    kinds = set(map(type, request_ids))
    if kinds <= _PLAIN:
        return
    try:
        set(request_ids)
    except TypeError:
        got = next(type(each).__name__ for each in request_ids if not isinstance(each, Hashable))
        raise checks.fail(argument, "hashable ids", got) from None
    for kind in kinds:
        # Tensors hash by identity, so that each step would be one of new requests.
        if issubclass(kind, Tensor):
            raise checks.fail(argument, "hashable ids, such as those of tolist()", "Tensor")
        # True and 1.0 equal 1, and would be the same request.
        if issubclass(kind, bool | float):
            got = next(repr(each) for each in request_ids if isinstance(each, bool | float))
            raise checks.fail(argument, "ids that are neither flags nor fractions", got)


def _listed(checks: Checks, request_ids: Any, kind: Any = Collection) -> tuple[Hashable | None, ...]:
    """Return the given ids of requests."""
    # The letters of a text would be ids, too. Lists, which come at every step, need no look at the classes.
    if type(request_ids) is not list and (
        not isinstance(request_ids, kind) or isinstance(request_ids, Tensor | str | bytes)
    ):
        raise checks.fail("request_ids", "a sequence of ids", type(request_ids).__name__)
    listed = tuple(request_ids)
    _check_ids(checks, "request_ids", listed)
    return listed


class _Group(NamedTuple):
    """Pinned buffers, and the event behind the copy out of the last one."""

    buffers: tuple[Tensor, ...]
    copied: Any


class _PinnedBuffers:
    """Pinned memory through which the slots of rows reach a GPU without a sync.

    The buffers of a group are written one after the other, and not again before the event behind the last
    copy. That event covers the earlier copies: all of them write `row_slot`, so a stream that copies to it
    has to wait for what other streams have done with it. If no group is free, one more is allocated and kept.

    Parameters
    ----------
    rows : int
        Size of each buffer.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._groups = deque(self._allocate() for _ in range(PINNED_GROUPS))  # the oldest copies' first
        self._next = 0  # buffer of the first group
        self._captured: list[Tensor] = []

    def _allocate(self, buffers: int = PINNED_BUFFERS) -> _Group:
        memory = torch.empty(buffers, self._rows, dtype=torch.int32, device="cpu", pin_memory=True)
        return _Group(memory.unbind(), torch.cuda.Event())

    def copy(self, slots: array[int], row_slot: Tensor) -> None:
        """Enqueue a copy to the GPU on its current stream; both have the size of the buffers."""
        if torch.cuda.is_current_stream_capturing():
            (buffer,), _ = self._allocate(1)
            _copy_through(buffer, slots, row_slot)
            self._captured.append(buffer)  # each replay of the graph copies out of it again
            return
        if self._next == 0 and not self._groups[0].copied.query():
            self._groups.appendleft(self._allocate())
        group = self._groups[0]
        _copy_through(group.buffers[self._next], slots, row_slot)
        self._next = (self._next + 1) % len(group.buffers)
        if self._next == 0:
            group.copied.record(torch.cuda.current_stream(row_slot.device))
            self._groups.rotate(-1)


def _copy_through(buffer: Tensor, slots: array[int], row_slot: Tensor) -> None:
    """Copy slots to a pinned buffer, and enqueue the copy to the GPU."""
    ctypes.memmove(buffer.data_ptr(), slots.buffer_info()[0], buffer.nbytes)
    row_slot.copy_(buffer, non_blocking=True)


class RequestSlots:
    """Hints of all layers for up to `num_slots` live requests.

    Host methods may be called while earlier steps are still running on the device: they enqueue work
    on the current stream, keep no device memory and read nothing back. Call them on the stream
    that runs the steps, outside CUDA graph capture. Not safe for concurrent host threads.

    Parameters
    ----------
    num_layers : int
        Indexer layers on this rank.
    num_slots : int
        Requests that can hold a hint at once, 1 to 2**26.
    k : int or None
        Items per row, 1 to 2**21, if positions are kept, as by `TopkState`. None keeps predictions alone,
        which serving wants.
    max_rows : int, optional
        Largest batch in rows, draft and padding rows included; default `num_slots`.
    device : str or torch.device, default "cpu"
        Where the tensors live. PyTorch's default device (`torch.set_default_device`) does not count.

    Attributes
    ----------
    indices : Tensor, ``[num_layers, num_slots, k]``, int32, or None
    words : Tensor, ``[num_layers, num_slots, 4]``, float32
    row_slot : Tensor, ``[max_rows]``, int32
        Slot of each row of the coming step, -1 for none. Its address never changes, so a captured
        graph may keep it.
    admitted, evicted, refused : int
        Requests that got a slot, that lost their slot to a newer request, and that found no free slot.

    Raises
    ------
    ValueError
        A size is no integer or out of range, or `device` is none that torch can use.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        k: int | None,
        *,
        max_rows: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        checks = Checks(NAME)
        num_slots = checks.integer("num_slots", num_slots, 1, MAX_ROWS)
        num_layers = checks.integer("num_layers", num_layers, 1, MAX_ROWS)
        k = None if k is None else checks.integer("k", k, 1, MAX_WIDTH)
        max_rows = num_slots if max_rows is None else checks.integer("max_rows", max_rows, 1, MAX_ROWS)
        self.device = checks.device("device", device)
        self.indices: Tensor | None = None
        if k is not None:
            self.indices = torch.full((num_layers, num_slots, k), -1, dtype=torch.int32, device=self.device)
        self.words = torch.full(
            (num_layers, num_slots, STATE_FLOATS), STATE_UNKNOWN, dtype=torch.float32, device=self.device
        )
        self._k = k
        self._layers: dict[int, TopkState] = {}
        self.row_slot = torch.full((max_rows,), NO_SLOT, dtype=torch.int32, device=self.device)
        self.admitted = self.evicted = self.refused = 0
        self._pinned = self._pinned_buffers()
        self._slots: dict[Hashable, int] = {}
        # Step in which each request outside of the last batch last had a row, or was admitted; oldest first.
        self._idle: dict[Hashable, int] = {}
        self._step = 0
        self._batch: tuple[Hashable | None, ...] = ()  # requests of the last `set_rows`
        self._members: set[Hashable] = set()  # the same, without those released since
        self._rows = self.row_slot  # result of that call, if there was one
        self._can_repeat = False  # whether there was, and no request was released since
        self._in_rows: list[int] = []  # first elements of `row_slot` on the device; the others are -1
        # The lowest slot is given first: kernels request low slots before they know which slot is the row's.
        self._free = list(range(num_slots))

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a view would be a tensor of its own: views are made again, of the copied tensors.
        return self.__dict__ | {"_layers": {}, "_pinned": None, "_rows": len(self._rows)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._pinned = self._pinned_buffers()
        self._rows = self.row_slot[: state["_rows"]]

    def _pinned_buffers(self) -> _PinnedBuffers | None:
        return _PinnedBuffers(self.row_slot.shape[0]) if self.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._slots

    @property
    def num_slots(self) -> int:
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        positions = 0 if self.indices is None else self.indices.nbytes
        return positions + self.words.nbytes + self.row_slot.nbytes

    def layer(self, index: int) -> TopkState:
        """State of one layer, to be passed to the op; it shares memory with `words` and `indices`.

        Raises
        ------
        ValueError
            There is no such layer.
        """
        if type(index) is not int or index not in self._layers:
            index = _checks("layer").integer("index", index, 0, self.words.shape[0] - 1)
            if index not in self._layers:
                indices = None if self.indices is None else self.indices[index]
                self._layers[index] = TopkState.of(self.words[index], indices, self._k)
        return self._layers[index]

    def slot_of(self, request_id: Hashable) -> int:
        """Slot of a request, -1 when it has none."""
        _check_ids(_checks("slot_of"), "request_id", (request_id,))
        return self._slots.get(request_id, NO_SLOT)

    def admit(self, request_id: Hashable) -> int:
        """Give a request a cleared slot; a request that has one keeps it, hint included.

        Raises
        ------
        SlotsFullError
            No slot is free.
        ValueError
            The id is None, a flag, a fraction, a tensor, or not hashable.
        """
        slot = self._admit(_checks("admit"), request_id)
        if slot == NO_SLOT:
            raise SlotsFullError(
                f"{NAME}.admit: request_id: wanted a free slot for {request_id!r}, got none: "
                f"all {self.num_slots} slots are held; release finished requests or raise num_slots"
            )
        return slot

    def try_admit(self, request_id: Hashable) -> int:
        """Like `admit`, but return -1 when no slot is free; for serving, where a hint is optional."""
        return self._admit(_checks("try_admit"), request_id)

    def _admit(self, checks: Checks, request_id: Hashable) -> int:
        if request_id is None:  # in `set_rows` it marks rows of no request
            raise checks.fail("request_id", "the id of a request", None)
        _check_ids(checks, "request_id", (request_id,))
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._take(request_id)
            if slot != NO_SLOT:
                self._clear([slot])
        return slot

    def _take(self, request_id: Hashable) -> int:
        """Give a new request a slot that the caller has to clear; -1 if none is free."""
        if not self._free:
            self.refused += 1
            return NO_SLOT
        slot = heapq.heappop(self._free)
        self._slots[request_id] = slot
        if request_id not in self._members:
            self._idle[request_id] = self._step
        self.admitted += 1
        return slot

    def _clear(self, slots: list[int]) -> None:
        """Clear slots of new requests: on admission and not on release.

        A step of a slot's previous owner may still be queued, and its write-back would undo a clear that was
        enqueued before it.
        """
        if len(slots) == 1:
            self.words[:, slots[0]].fill_(STATE_UNKNOWN)
            if self.indices is not None:
                self.indices[:, slots[0]].fill_(-1)
            return
        # The rows of the step are copied behind this, unless they are these slots.
        self._write_rows(slots)
        where = self.row_slot[: len(slots)].to(torch.int64)
        self.words.index_fill_(1, where, STATE_UNKNOWN)
        if self.indices is not None:
            self.indices.index_fill_(1, where, -1)

    def _write_rows(self, slots: list[int]) -> None:
        """Copy slots to the first elements of `row_slot`, and -1 to the others; no sync."""
        padding = array("i", [NO_SLOT]) * (self.row_slot.shape[0] - len(slots))
        rows = array("i", slots) + padding
        if self._pinned is None:
            self.row_slot.copy_(torch.frombuffer(rows, dtype=torch.int32))
        else:
            self._pinned.copy(rows, self.row_slot)
        self._in_rows = slots

    def release(self, request_id: Hashable) -> None:
        """Take a request's slot back; unknown ids are ignored."""
        _check_ids(_checks("release"), "request_id", (request_id,))
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._can_repeat = False
            self._members.discard(request_id)
            self._idle.pop(request_id, None)
            heapq.heappush(self._free, slot)

    def retain(self, request_ids: Iterable[Hashable]) -> None:
        """Release every request that is not listed; engines drop requests without saying so."""
        alive = set(_listed(_checks("retain"), request_ids, Iterable))
        for request_id in [held for held in self._slots if held not in alive]:
            self.release(request_id)

    def set_rows(self, request_ids: Sequence[Hashable | None], next_n: int = 1, pad_rows: int = 0) -> Tensor:
        """Say which request each row of the coming step belongs to.

        A batch whose rows have the slots of the last batch's rows costs the device nothing. Unknown requests
        are admitted. A request that had no row for `IDLE_STEPS` steps is released. When no slot is free, the
        least recently used request outside of this batch loses its slot. So requests that vanished without
        `release` do not pile up, and low slots, which kernels find sooner, become free again.

        Parameters
        ----------
        request_ids : sequence of hashable or None
            Request of each group of `next_n` rows, in row order: integers, texts or other hashable ids. None
            marks a dummy request, as CUDA graph warm-up uses. If an id occurs again, its later rows get no
            slot: two writers would race.
        next_n : int, default 1
            Rows per request; all of them share its slot.
        pad_rows : int, default 0
            Dummy rows after the last request.

        Returns
        -------
        Tensor, ``[len(request_ids) * next_n + pad_rows]``, int32
            View of `row_slot`; everything behind it is -1.

        Raises
        ------
        ValueError
            More rows than `row_slot` holds, `next_n` below 1, a text in place of a sequence of ids, or ids
            that are flags, fractions, tensors or not hashable. The call then changes nothing.
        """
        checks = _checks("set_rows")
        ids = _listed(checks, request_ids)
        next_n, pad_rows = checks.integer("next_n", next_n, 1), checks.integer("pad_rows", pad_rows, 0)
        rows = len(ids) * next_n + pad_rows
        if rows > self.row_slot.shape[0]:
            raise checks.fail("request_ids", f"at most max_rows = {self.row_slot.shape[0]} rows", rows)
        slots = self._slots_of_batch(ids)
        if next_n > 1:
            slots = [slot for slot in slots for _ in range(next_n)]
        if slots != self._in_rows:
            self._write_rows(slots)
        if self._rows.shape[0] != rows:
            self._rows = self.row_slot[:rows]
        self._can_repeat = True
        return self._rows

    def repeat_rows(self) -> Tensor | None:
        """Return the rows of the last `set_rows` for one more step, at hardly any cost: nothing is copied.

        Returns
        -------
        Tensor or None
            Result of the last `set_rows`. None if it was never called, or if a request was released since.
        """
        if not self._can_repeat:
            return None
        self._step += 1
        return self._rows

    def accept(self, next_state: Tensor, slots: Tensor, accepted: Tensor) -> None:
        """Copy, in all layers, the state of each request's last accepted draft row into its slot.

        Call it before the slots of that step are given to other requests: `admit` clears a slot on the same
        stream, and a state accepted after that would be the previous owner's. While its work runs, it needs
        device memory of about the size of `words`.

        Parameters
        ----------
        next_state : Tensor, ``[num_layers, requests * next_n, 4]``, float32
            `next_state` of the op for each layer.
        slots, accepted : Tensor, ``[requests]``, integer
            As for `TopkState.accept`; `slots` may be a part of `row_slot`.
        """
        accept_rows(_checks("accept"), self.words, next_state, slots, accepted)

    def seed(self, layer: int, request_id: Hashable, row_indices: Tensor) -> bool:
        """Hand the top-k of the last context row to the first decode step.

        Parameters
        ----------
        layer : int
            Index of the layer, as for the method `layer`.
        request_id : hashable
            Request that just finished its prompt.
        row_indices : Tensor, ``[m]``, integer
            Positions, -1 padded, on the same device. Columns past k are dropped, missing ones are -1.

        Returns
        -------
        bool
            Whether the request has a slot and positions are kept; if not, nothing is written.

        Raises
        ------
        ValueError
            There is no such layer, or `row_indices` is no tensor of one dimension, of integers and on the
            slots' device.
        """
        checks = _checks("seed")
        checks.integer("layer", layer, 0, self.words.shape[0] - 1)
        checks.integers("row_indices", row_indices, self.words, (None,))
        _check_ids(checks, "request_id", (request_id,))
        slot = self._slots.get(request_id)
        if slot is None or self.indices is None:
            return False
        target = self.indices[layer, slot]
        used = min(target.shape[0], row_indices.shape[0])
        target[:used].copy_(row_indices[:used], non_blocking=True)
        target[used:].fill_(-1)
        self.words[layer, slot].fill_(STATE_UNKNOWN)
        return True

    def _slots_of_batch(self, request_ids: tuple[Hashable | None, ...]) -> list[int]:
        self._note_batch(request_ids)
        new = self._members - self._slots.keys()
        if new:
            self._make_room(len(new))
            taken = [self._take(request_id) for request_id in dict.fromkeys(request_ids) if request_id in new]
            cleared = [slot for slot in taken if slot != NO_SLOT]
            if cleared:
                self._clear(cleared)
        slots = list(map(self._slots.get, request_ids, repeat(NO_SLOT)))
        if len(self._members) + request_ids.count(None) != len(request_ids):  # an id occurs again
            first = {slot: row for row, slot in reversed(list(enumerate(slots)))}
            slots = [slot if first[slot] == row else NO_SLOT for row, slot in enumerate(slots)]
        return slots

    def _note_batch(self, request_ids: tuple[Hashable | None, ...]) -> None:
        """Begin a step, and note which requests are not in its batch, and since when."""
        members = set(request_ids)
        members.discard(None)
        if members != self._members:
            left = self._members - members
            held = (each for each in self._batch if each in left and each in self._slots)
            self._idle.update(zip(held, repeat(self._step)))
            for request_id in self._idle.keys() & members:
                del self._idle[request_id]
        self._batch, self._members = request_ids, members
        self._step += 1
        while self._idle and self._idle[oldest := next(iter(self._idle))] + IDLE_STEPS < self._step:
            self.release(oldest)

    def _make_room(self, new: int) -> None:
        """Take slots from the least recently used requests outside of the batch, for lack of free ones."""
        lacking = max(0, new - len(self._free))
        for request_id in list(self._idle)[:lacking]:
            self.release(request_id)
            self.evicted += 1
