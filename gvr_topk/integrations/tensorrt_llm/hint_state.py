"""State kept by request between the steps of one cache manager, and the slot that each row uses."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gvr_topk.constants import (
    MAX_WIDTH,
    STATE_FLOATS,
    STATE_UNKNOWN,
    GuessSource,
    HintReason,
    StatsColumn,
)
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.counters import Counters, Measured
from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.signatures import check_object
from gvr_topk.integrations.tensorrt_llm.upstream import MANAGER_OBJECT
from gvr_topk.policy import can_use_heuristic
from gvr_topk.request_slots import RequestSlots

ROWS_PER_REQUEST = 8
"""Rows of one step that there is room for, per request of the largest batch. MTP uses at most 4."""

DUMMY_FROM = 1 << 63
"""Request ids of CUDA graph padding count down from 2**64 - 1; real ids stay far below this."""

HINTED = "hinted"
"""Kind of a row whose request has a slot, in the counters."""

DUMMY = "dummy"
"""Kind of a row of no request."""

NO_LAYER = -1
"""Layer without a state."""

_LLM_REQUEST = "tensorrt_llm._torch.pyexecutor.llm_request"

_INTEGERS = (torch.int32, torch.int64)
"""Dtypes that numbers of accepted rows may have."""


class _LengthLimits:
    """The gate's reasons against rows whose lengths the configuration refuses, asked once for each range.

    The gate compares a length with `k` and with the limits, so its answer stays the same between these.
    """

    def __init__(self, k: int, shortest: int, longest: int) -> None:
        starts = sorted({0, k + 1, shortest, longest + 1})
        reasons = [
            can_use_heuristic(length=start, k=k, min_length=shortest, max_length=longest).code
            for start in starts
        ]
        self._starts = np.array(starts)
        self._refuses = np.isin(reasons, (HintReason.TOO_SHORT, HintReason.TOO_LONG))
        self._names = [reason.name.lower() for reason in reasons]

    def refused(self, cached: Sequence[int], new: Tensor, compress_ratio: int) -> list[tuple[int, str]]:
        """Return the rows that are refused and the gate's reason for each.

        `cached` are the keys of each request before this step. The first elements of `new` are the keys that
        this step adds to the same requests.
        """
        lengths = (np.array(cached) + np.array(new[: len(cached)].tolist())) // compress_ratio
        ranges = np.searchsorted(self._starts, lengths, side="right") - 1
        return [(row, self._names[ranges[row]]) for row in np.flatnonzero(self._refuses[ranges]).tolist()]


class HintState:
    """State that one cache manager's live requests leave from step to step.

    With draft tokens, a request's state is what its last accepted row leaves, if TensorRT-LLM tells how many
    rows were accepted. It knows this only after the selections of the step. So each row leaves its state in
    `next_state`, and the next `update` copies the state of each last accepted row to its slot, before any
    slot changes hands. TensorRT-LLM tells the numbers while MTP drafts, in ``metadata.mtp_num_accepted``: one
    integer per request of the batch, requests in context phase first; the token that is not a draft counts
    too. TensorRT-LLM may take the tensor back after that, and a replayed CUDA graph writes it without running
    any Python. So `note_accepted` keeps the tensor: until the next step, or for good if the batch is a CUDA
    graph's.

    If TensorRT-LLM tells nothing (before its pull request 15806, and without
    ``index_share_for_mtp_iteration``), or if positions are kept, which `next_state` does not hold, the state
    is what the last row leaves, accepted or not. Such a state can cost time but never changes a result.

    Without attention data parallelism, MTP's draft layers have a cache manager of their own. The draft loop
    puts it into the batch's metadata and takes it out again, without a ``prepare`` of its own. So the state
    has the layers of both managers, the draft layers last, and the slots of a batch's rows serve both.

    Attributes
    ----------
    batch : callable
        Returns the metadata of the last step that was noted; None if it is gone.
    next_state : Tensor, ``[layers, max_rows, 4]``, float32, or None
        State that each draft row of the step leaves; unknown where a row left none. Allocated once, when
        TensorRT-LLM first tells how many rows it has accepted; None before.
    """

    def __init__(self, metadata: Any, manager: Any, mode: Mode) -> None:
        self.mode = mode
        self.options = environment.options()
        self.programmatic_launch = environment.programmatic_launch()
        limits = self.options.length_limits
        self.k = int(first_attribute(metadata, "sparse_mla_topk", "num_sparse_topk"))
        self._limits = None if limits == (0, MAX_WIDTH) else _LengthLimits(self.k, *limits)
        requests = max(
            int(first_attribute(metadata, "max_num_sequences", "max_num_requests")),
            int(getattr(manager, "max_batch_size", 0) or 0),
        )
        managers = [manager]
        drafts = getattr(metadata, "draft_kv_cache_manager", None)
        if drafts is not None and drafts is not manager and check_object(MANAGER_OBJECT, drafts).good:
            managers.append(drafts)
        layers = 0
        self._layers: list[tuple[Callable[[], Any], dict[int, int]]] = []  # of each manager
        for each in managers:
            places = {layer: layers + place for layer, place in each.layer_offsets.items()}
            self._layers.append((weakref.ref(each), places))
            layers += int(each.num_local_layers)
        self.compress_ratio = _compress_ratio(metadata)
        self.max_rows = requests * ROWS_PER_REQUEST  # of one step that can have a slot each
        device = first_attribute(metadata, "kv_lens_cuda_runtime", "kv_lens_cuda").device
        # The engine may run in inference mode; tensors made there could not be written outside of it.
        with torch.inference_mode(False):
            self.requests = RequestSlots(
                layers,
                requests * _micro_batches(metadata, manager),
                self.k if self.options.positions_kept else None,
                max_rows=requests,
                device=device,
            )
            self.draft_row_slot = torch.full((self.max_rows,), -1, dtype=torch.int32, device=device)
            self.stats: Tensor | None = None
            if self.options.stats:
                shape = (layers, self.max_rows, len(StatsColumn))
                self.stats = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.device = self.requests.device
        self.next_state: Tensor | None = None
        self._accepted: dict[int, tuple[Callable[[], Any], Tensor]] = {}  # by the id of a batch's metadata
        self._draft_rows = 0  # rows of the last step that may have left something in `next_state`
        self.batch: Callable[[], Any] = lambda: None
        self._has_rows = False  # whether the batch's rows have slots
        self._draft_layout = (0, 0, 0)  # context requests, generations and rows of each in the views below
        self._draft_views: tuple[Tensor, ...] = ()
        self._last: tuple[Any, ...] = ()  # what the slots and kinds of the last rows follow from
        self._last_kinds: dict[str, int] = {}
        self.next_n = 1
        self.num_requests = 0
        self.num_contexts = 0
        self.contexts: tuple[Tensor, ...] | None = None
        self.announced = False
        self.waited = False

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        tensors = (self.draft_row_slot, self.stats, self.next_state)
        return self.requests.nbytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __str__(self) -> str:
        layers, slots, _ = self.requests.words.shape
        kept = "predictor and positions" if self.options.positions_kept else "predictor"
        return (
            f"{layers} layers, k = {self.k}, {slots} requests, {self.nbytes / 2**20:.1f} MiB of state "
            f"({kept}), path {self.options.path} on {self.device}"
        )

    def layer_of(self, manager: Any, layer: int) -> int:
        """Return which layer of the state one of a manager's layers has; `NO_LAYER` if it has none.

        The manager is that in the batch's metadata at the time of the call; the layer is one of the model.
        """
        for owner, places in self._layers:
            if owner() is manager:
                return places.get(layer, NO_LAYER)
        return NO_LAYER

    def update(self, metadata: Any, counters: Counters) -> None:
        """Note the requests of the coming step, whose ``prepare`` is done; one copy to the device, no sync.

        Before that, it copies the states of the last step's accepted draft rows into their slots. A step with
        the requests of the last one, in the same rows, costs next to nothing.
        """
        self._accept()
        if self.batch() is not metadata:
            self.batch = weakref.ref(metadata)
        self._has_rows, self.contexts = False, None
        graph = getattr(metadata, "is_cuda_graph", False)
        if not graph:
            self._accepted.pop(id(metadata), None)
        requests = metadata.seq_lens.shape[0]
        contexts, generations = int(metadata.num_contexts), int(metadata.num_generations)
        tokens = int(metadata.num_tokens) - int(metadata.num_ctx_tokens)
        counters.steps["graph" if graph else "eager"] += 1
        if generations and getattr(metadata, "skip_indexer_for_gen_reqs", False):
            counters.steps["skipped"] += 1  # the state stays a step behind, which is harmless but counted
            self.waited = True
        if requests > self.requests.row_slot.shape[0]:
            counters.steps["over capacity"] += 1
            return
        if generations and tokens % generations:
            counters.steps["ragged"] += 1  # requests with different numbers of draft tokens
            return
        next_n = tokens // generations if generations else 1
        rows = (metadata.request_ids[:requests], contexts, next_n)
        if contexts or self._limits is not None or rows != self._last or self.requests.repeat_rows() is None:
            self._set_rows(metadata, *rows, counters)
            self._last = rows
        self._draft_rows = tokens if next_n > 1 and tokens <= self.max_rows else 0
        for kind, count in self._last_kinds.items():
            counters.rows[kind] += count
        self.num_requests, self.num_contexts, self.next_n = requests, contexts, next_n
        self._has_rows = True

    def _set_rows(
        self, metadata: Any, request_ids: Sequence[int], contexts: int, next_n: int, counters: Counters
    ) -> None:
        """Give the rows of a batch the slots of their requests."""
        owners, kinds = self._owners(metadata, request_ids, contexts)
        slots = self.requests
        admitted, evicted, refused = slots.admitted, slots.evicted, slots.refused
        row_slot = slots.set_rows(owners)
        if slots.admitted != admitted or slots.refused != refused:  # nothing is evicted but for these
            counters.requests["admitted"] += slots.admitted - admitted
            counters.requests["evicted"] += slots.evicted - evicted
            counters.requests["refused"] += slots.refused - refused
        generations = len(owners) - contexts
        if next_n > 1 and generations * next_n <= self.max_rows:
            layout = (contexts, generations, next_n)
            if layout != self._draft_layout:
                self._draft_layout, shape = layout, (generations, next_n)
                by_request = row_slot[contexts:].unsqueeze(1).expand(shape)
                self._draft_views = self.draft_row_slot[: generations * next_n].view(shape), by_request
            target, source = self._draft_views
            target.copy_(source)
        self._last_kinds = {kind: next_n * count for kind, count in kinds.items() if count}
        if contexts:
            self._note_contexts(metadata, owners[:contexts], counters)

    def row_slot(self, metadata: Any, next_n: int, rows: int) -> Tensor | None:
        """Return the slot of each row of a call, or None when this batch was not prepared for such a call.

        The draft steps of MTP run inside one step with one row per request and, once the prompt tokens
        are through, with every request of the batch in generation; so the layout is taken from the
        call and from the metadata as it is now.
        """
        if not self._has_rows or self.batch() is not metadata:
            return None
        start = int(metadata.num_contexts)
        if next_n == 1:
            return self.requests.row_slot[start : start + rows] if start + rows <= self.num_requests else None
        prepared = next_n == self.next_n and rows == (self.num_requests - self.num_contexts) * next_n
        fits = prepared and rows <= self.max_rows
        return self.draft_row_slot[:rows] if fits and start == self.num_contexts else None

    def next_rows(self, layer: int, next_n: int, rows: int) -> Tensor | None:
        """Return where the draft rows of a call for which `row_slot` returns slots leave their state.

        None if the last row leaves it in the slot.
        """
        return None if self.next_state is None or next_n == 1 else self.next_state[layer, :rows]

    def note_accepted(self, metadata: Any) -> str:
        """Keep the tensor of a draft loop that tells how many rows of each request were accepted.

        The tensor is not read here. The first call that is not captured allocates `next_state`. If something
        is wrong with the tensor, it is ignored, and the text that is returned says what.
        """
        accepted = getattr(metadata, "mtp_num_accepted", None)
        told = accepted is not None and getattr(metadata, "in_mtp_draft_loop", False)
        if not told or not self._draft_rows or self.options.positions_kept or self.batch() is not metadata:
            return ""
        if not isinstance(accepted, Tensor) or accepted.dim() != 1 or accepted.dtype not in _INTEGERS:
            return f"wanted a tensor of integers by request, got {_kind(accepted)}"
        if accepted.device != self.device or accepted.shape[0] < self.num_requests:
            return f"wanted one integer for each request of the batch on {self.device}, got others"
        if id(metadata) not in self._accepted:
            self._accepted = {key: kept for key, kept in self._accepted.items() if kept[0]() is not None}
        self._accepted[id(metadata)] = (weakref.ref(metadata), accepted)
        if self.next_state is None and not capturing(self.device):
            shape = (self.requests.words.shape[0], self.max_rows, STATE_FLOATS)
            with torch.inference_mode(False):
                self.next_state = torch.full(shape, STATE_UNKNOWN, dtype=torch.float32, device=self.device)
        return ""

    def seed(self, layer: int, metadata: Any, result: Tensor) -> None:
        """Give the top-k of the last prompt row to the first decode step, on the device.

        It is a row of what the indexer selected, ``[tokens, >= k]``.
        """
        if self.contexts is None or layer == NO_LAYER or self.batch() is not metadata:
            return
        positions = self.requests.layer(layer).indices
        assert positions is not None
        skipped = getattr(metadata, "skip_indexer_for_ctx_reqs", False)
        if skipped or metadata.num_contexts == 0 or result.shape[1] < self.k:
            return
        rows, slots = self.contexts
        positions.index_copy_(0, slots, result.index_select(0, rows)[:, : self.k])
        self.requests.layer(layer).words.index_fill_(0, slots, STATE_UNKNOWN)

    def measure(self) -> Measured:
        """Read hit ratio and guess misses of the last step from the device."""
        if self.stats is None:
            return Measured()
        rows = (self.num_requests - self.num_contexts) * self.next_n
        last = self.stats[:, :rows].cpu()
        guessed = last[..., StatsColumn.GUESS] > GuessSource.NONE
        misses = int((guessed & (last[..., StatsColumn.GUESS_HIT] != 1)).sum())
        hits = last[..., StatsColumn.HITS]
        hits = hits[hits > 0]  # a hint of which nothing is in the result counts as no hint
        ratio = float(hits.double().mean()) / self.k if hits.numel() else None
        return Measured(ratio, hits.numel(), int(guessed.sum()), misses)

    def _accept(self) -> None:
        """Copy the states of the last step's accepted rows into the slots of these rows."""
        rows, self._draft_rows = self._draft_rows, 0
        if not rows or self.next_state is None:
            return
        generations = slice(self.num_contexts, self.num_requests)
        slots = self.requests.row_slot[generations]
        batch, told = self._accepted.get(id(self.batch()), (None, None))
        if told is not None and batch is not None and batch() is self.batch():
            accepted = told[generations]
        else:
            accepted = torch.full_like(slots, self.next_n)  # not told: the last row counts as accepted
        left = self.next_state[:, :rows]
        self.requests.accept(left, slots, accepted)
        left.fill_(STATE_UNKNOWN)  # so that a step that leaves nothing does not copy this again

    def _owners(
        self, metadata: Any, request_ids: Sequence[int], contexts: int
    ) -> tuple[list[int | None], dict[str, int]]:
        """Return the request of each row, None if it uses no slot, and how many generations are of each kind.

        A kind is `HINTED`, `DUMMY`, or the gate's reason against a hint.
        """
        # Padding, warm-up of a graph, and an idle attention-DP rank run requests that are none.
        idle = getattr(sys.modules.get(_LLM_REQUEST), "ATTENTION_DP_DUMMY_REQUEST_ID", 0)
        owners = [
            request if 0 <= request < DUMMY_FROM and request != idle else None for request in request_ids
        ]
        dummies = owners[contexts:].count(None)
        kinds = {HINTED: len(owners) - contexts - dummies, DUMMY: dummies}
        if self._limits is not None:
            cached = metadata.kv_cache_params.num_cached_tokens_per_seq
            for row, reason in self._limits.refused(cached, metadata.seq_lens, self.compress_ratio):
                if owners[row] is not None:
                    owners[row] = None
                    if row >= contexts:
                        kinds[HINTED] -= 1
                        kinds[reason] = kinds.get(reason, 0) + 1
        return owners, kinds

    def _note_contexts(self, metadata: Any, owners: Sequence[int | None], counters: Counters) -> None:
        """Note which rows end a prompt chunk, and which slots they seed. Eager steps only."""
        if self.requests.indices is None:
            return
        ends = torch.cumsum(metadata.seq_lens[: len(owners)], 0).tolist()
        pairs = [
            (end - 1, slot)
            for end, owner in zip(ends, owners, strict=True)
            if owner is not None and (slot := self.requests.slot_of(owner)) >= 0
        ]
        if pairs:
            counters.requests["seeded"] += len(pairs)
            host = torch.tensor(pairs, dtype=torch.int64, device="cpu").t().contiguous()
            if self.device.type == "cuda":
                host = host.pin_memory()
            self.contexts = host.to(self.device, non_blocking=True).unbind(0)


def _kind(value: Any) -> str:
    """Describe the type of a value that should have been another tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of {value.dim()} dimensions"


def first_attribute(instance: Any, *names: str) -> Any:
    """Return the first of these attributes that an object has."""
    return next(getattr(instance, name) for name in names if hasattr(instance, name))


def _micro_batches(metadata: Any, manager: Any) -> int:
    """Return how many batches are alive at once: one, or with pipeline stages one more than their number."""
    mapping = getattr(metadata, "mapping", None) or getattr(manager, "mapping", None)
    stages = int(getattr(mapping, "pp_size", 1) or 1)
    return 1 if stages == 1 else stages + 1


def _compress_ratio(metadata: Any) -> int:
    """Return the keys per score of the layers that have an indexer; other layers may compress more."""
    ratio = getattr(metadata, "_indexer_compress_ratio", None)
    if ratio is None:
        ratios = getattr(metadata, "compress_ratios", None) or ()
        ratio = min((each for each in ratios if each > 1), default=1)
    return max(1, int(ratio))
