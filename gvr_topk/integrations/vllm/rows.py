"""State kept by request between the steps of one metadata builder, and the request that each row belongs to.

A builder serves the layers of one group of the KV cache. vLLM's V2 runner keeps each request at one place of
its tables for as long as the request runs. With every batch it passes these places, ``req_idx``, and flags,
``is_prefilling``, that say which requests still work on their prompts. A place is given to another request
later. The new request is recognised by its prompt: every request has a prompt step, even if that is one
token, which vLLM counts among the decode rows. The batches that graphs are captured with name places, too,
but never a prompt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gvr_topk.integrations._kit.counters import Counters
from gvr_topk.request_slots import RequestSlots
from gvr_topk.state import TopkState

ATTRIBUTE = "gvr_topk_rows"
"""Name of the attribute of a batch's metadata that holds its `Rows`."""

_EVENTS = ("admitted", "evicted", "refused")


@dataclass(frozen=True)
class Rows:
    """Which request each decode row of one batch belongs to."""

    requests: RequestStates
    slots: Tensor
    """``[rows]``, int32: slot of each row, -1 for none; always the same memory, so that a captured graph may
    keep it."""
    next_n: int  # rows of each request that lie together
    lengths: Tensor  # ``seq_lens`` of the decode metadata; a call with others is not about these rows

    def fit(self, rows: int, seq_lens: Tensor, next_n: int) -> bool:
        """Whether a call is about these rows."""
        same = seq_lens.data_ptr() == self.lengths.data_ptr()
        return same and rows == self.slots.shape[0] and next_n == self.next_n


class RequestStates:
    """State of the requests of one builder, one slot each, in every layer of its group.

    `layers` are the names of the indexer caches, as vLLM calls them, and `requests` can run at once. A step
    of more than `max_rows` decode rows, padding included, goes without state.
    """

    def __init__(
        self, layers: Sequence[str], requests: int, max_rows: int, device: torch.device | str
    ) -> None:
        # vLLM runs in inference mode; tensors made there could not be written outside of it.
        with torch.inference_mode(False):
            self.slots = RequestSlots(len(layers), requests, None, max_rows=max_rows, device=device)
        self._layers = {name: index for index, name in enumerate(layers)}
        self._owners: Counter[int | None] = Counter()  # how many requests each place has had; None is padding
        self._starting: set[int] = set()
        self._key: _BatchKey | None = None  # key of the last batch, if the next batch may repeat its rows
        self._next_n = 1  # rows of each request in that batch

    def __str__(self) -> str:
        size = self.slots.nbytes / 2**10
        counts = f"{len(self._layers)} layers, {self.slots.num_slots} requests"
        return f"{counts}, {size:,.1f} KiB on {self.slots.device}"

    def __contains__(self, layer: str) -> bool:
        return layer in self._layers

    def state(self, layer: str) -> TopkState:
        """State of one layer; it holds no positions."""
        return self.slots.layer(self._layers[layer])

    def update(self, common: Any, metadata: Any, counters: Counters) -> Rows | None:
        """Note the requests of the coming step; one copy to the device, no sync. Not inside a capture.

        `metadata` is what vLLM built from `common`; `counters` count requests that got, lost or found no
        slot. Returns None where the batch has no decode rows, or rows that are laid out in an unknown way.
        """
        decodes = int(metadata.num_decodes)
        key = _key_of(common, metadata, decodes)
        if key is not None and key == self._key:
            repeated = self.slots.repeat_rows()
            if repeated is not None:
                return Rows(self, repeated, self._next_n, metadata.decode.seq_lens)
        # A draft model's batch has no req_idx.
        places = [] if common.req_idx is None else [int(place) for place in common.req_idx]
        self._note_starts(places, _prefilling(common, len(places), decodes))
        owners, next_n = self._owners_of_rows(common, metadata, places[:decodes])
        # A place that has had no prompt so far belongs to a batch that a graph is captured with.
        groups = [(place, self._owners[place]) if self._owners[place] else None for place in owners]
        before = [getattr(self.slots, event) for event in _EVENTS]
        row_slot = self.slots.set_rows(groups, next_n)  # without groups, too, because a graph may read them
        for event, count in zip(_EVENTS, before, strict=True):
            counters.requests[event] += getattr(self.slots, event) - count
        self._key, self._next_n = key if groups else None, next_n
        return Rows(self, row_slot, next_n, metadata.decode.seq_lens) if groups else None

    def _owners_of_rows(
        self, common: Any, metadata: Any, places: Sequence[int]
    ) -> tuple[list[int | None], int]:
        """Return `owners_of_rows` of a batch; no owners if it has more rows than there is room for."""
        decodes = int(metadata.num_decodes)
        if decodes == 0:
            return [], 1
        starts = common.query_start_loc_cpu[: decodes + 1].tolist()
        drafts = [end - start for start, end in itertools.pairwise(starts)]
        lengths: Tensor = metadata.decode.seq_lens
        shape = (lengths.shape[0], lengths.shape[1] if lengths.dim() == 2 else 1)
        owners, next_n = owners_of_rows(places, drafts, shape)
        return (owners, next_n) if len(owners) * next_n <= self.slots.row_slot.shape[0] else ([], 1)

    def _note_starts(self, places: Sequence[int], prefilling: Sequence[bool]) -> None:
        """Give a place to a new owner when a request starts there, once for all chunks of its prompt."""
        for place, is_prefilling in zip(places, prefilling, strict=True):
            if not is_prefilling:
                self._starting.discard(place)
            elif place not in self._starting:
                self._starting.add(place)
                self._owners[place] += 1


_BatchKey = tuple[bytes, bytes, torch.Size]


def _key_of(common: Any, metadata: Any, decodes: int) -> _BatchKey | None:
    """Return what determines a batch's rows; None unless it is known that no request works on its prompt."""
    if decodes == 0 or common.req_idx is None:
        return None
    flags = _prompt_flags(common, len(common.req_idx))
    if flags is None or flags.numpy().any():
        return None
    places, starts = np.asarray(common.req_idx), common.query_start_loc_cpu.numpy()[: decodes + 1]
    return places.tobytes(), starts.tobytes(), metadata.decode.seq_lens.shape


def _prompt_flags(common: Any, count: int) -> Tensor | None:
    """Return whether each request works on its prompt; None if vLLM does not say it for `count` requests."""
    flags: Tensor | None = getattr(common, "is_prefilling", None)
    known = flags is not None and flags.device.type == "cpu" and flags.shape[0] >= count
    return flags if known else None


def _prefilling(common: Any, count: int, decodes: int) -> list[bool]:
    """Return which of the first `count` requests of a batch still work on their prompts.

    The split into decodes and other requests does not tell: a prompt's last token may be a decode row, and a
    request with fewer drafts than the others does not count as a decode.
    """
    flags = _prompt_flags(common, count)
    if flags is None:
        return [row >= decodes for row in range(count)]
    found: list[bool] = flags[:count].tolist()
    return found


def owners_of_rows(
    places: Sequence[int], drafts: Sequence[int], shape: tuple[int, int]
) -> tuple[list[int | None], int]:
    """Say which request each group of decode rows belongs to, and how many rows a group has.

    `places` are those of the decoding requests; padding requests follow without one. `drafts` are the rows of
    each request, padding requests included. If `shape`, that of ``seq_lens``, has as many rows as there are
    requests, each request has `shape[1]` rows that lie together. If it has as many rows as there are tokens,
    each row is a request of its own to vLLM, and the rows of one request follow one another. Padding belongs
    to None, and so do all but the last of several groups that would share the slot of one request. No group
    is returned where the rows are laid out in another way.

    >>> owners_of_rows([7, 3], [2, 2, 0], (3, 2))
    ([7, 3, None], 2)
    >>> owners_of_rows([7, 3], [3, 1, 0], (5, 1))
    ([None, None, 7, 3, None], 1)
    """
    batch, next_n = shape
    known: list[int | None] = [*places, *[None] * (len(drafts) - len(places))]
    if batch == len(drafts):
        # A request with fewer rows than the others is padded at its end, so a padding row would leave its
        # state.
        pairs = zip(known, drafts, strict=True)
        return [place if count == next_n else None for place, count in pairs], next_n
    if next_n != 1 or batch < sum(drafts):
        return [], next_n
    owners: list[int | None] = []
    for place, count in zip(known, drafts, strict=True):
        owners += [None] * (count - 1) + [place] * min(count, 1)
    return owners + [None] * (batch - len(owners)), 1
