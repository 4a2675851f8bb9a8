"""The hook around the indexer of one layer, and the replacement of its top-k op.

TensorRT-LLM calls the op without saying for which layer or for which requests. So the call of
``Indexer.sparse_attn_indexer`` around it is wrapped to note both, and ``prepare`` of the batch metadata
is wrapped to say, once per step and on the host, which request each row belongs to.

Inside a captured region the hook allocates nothing, copies nothing and reads nothing back: every tensor
the op takes exists since the first step, at an address that never changes.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.contract import STATS_COLUMNS
from gvr_topk.integrations import environment
from gvr_topk.integrations.counters import ORIGINAL, OURS, Counters, Measured
from gvr_topk.integrations.environment import Mode
from gvr_topk.integrations.patch_points import MANAGER_OBJECT, METADATA_OBJECT, check_object
from gvr_topk.ops import indexer_topk_decode, library_status
from gvr_topk.prior import UNKNOWN, PriorState

ROWS_PER_REQUEST = 8
"""Room for rows per request in one step. MTP uses at most 4; the tensors are small."""

DUMMY_FROM = 1 << 63
"""Request ids of CUDA graph padding count down from 2**64 - 1; real ids stay far below this."""


class Closed(NamedTuple):
    """A cache manager whose requests we leave to the original op, and why."""

    reason: str


class Call(NamedTuple):
    """The indexer call in progress on this thread."""

    state: HintState | Closed
    metadata: Any
    layer: int


class HintState:
    """Hints of one cache manager, and with it of one set of live requests.

    Parameters
    ----------
    metadata : DSAtrtllmAttentionMetadata
        Any batch of this manager.
    manager : DSACacheManager
    mode : Mode
    """

    def __init__(self, metadata: Any, manager: Any, mode: Mode) -> None:
        self.mode = mode
        self.options = environment.options()
        self.programmatic_launch = environment.programmatic_launch()
        # The guess of the next step needs positions only for statistics and in the four-phase kernel.
        self.keeps_positions = self.options.stats or self.options.path == "gvr"
        self.k = int(_first(metadata, "sparse_mla_topk", "num_sparse_topk"))
        requests = max(
            int(_first(metadata, "max_num_sequences", "max_num_requests")),
            int(getattr(manager, "max_batch_size", 0) or 0),
        )
        self.layer_offsets: Mapping[int, int] = manager.layer_offsets
        rows = requests * ROWS_PER_REQUEST
        device = _first(metadata, "kv_lens_cuda_runtime", "kv_lens_cuda").device
        # The engine may run in inference mode; tensors made there could not be written outside of it.
        with torch.inference_mode(False):
            layers = int(manager.num_local_layers)
            self.prior = PriorState(layers, requests, self.k, max_rows=requests, device=device)
            self.draft_row_slot = torch.full((rows,), -1, dtype=torch.int32, device=device)
            self.stats: Tensor | None = None
            if self.options.stats:
                shape = (layers, rows, len(STATS_COLUMNS))
                self.stats = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.batch: Callable[[], Any] = lambda: None
        self.next_n = 1
        self.num_requests = 0
        self.num_contexts = 0
        self.contexts: tuple[Tensor, ...] | None = None

    @property
    def device(self) -> torch.device:
        return self.prior.device

    def update(self, metadata: Any, counters: Counters) -> None:
        """Note the requests of the coming step; one copy to the device, no sync.

        Parameters
        ----------
        metadata : DSAtrtllmAttentionMetadata
            After its own ``prepare``: requests in context phase first, then those in generation.
        counters : Counters
        """
        self.batch = lambda: None
        requests = len(metadata.seq_lens)
        contexts = int(metadata.num_contexts)
        generations = int(metadata.num_generations)
        counters.steps["graph" if getattr(metadata, "is_cuda_graph", False) else "eager"] += 1
        if generations and getattr(metadata, "skip_indexer_for_gen_reqs", False):
            counters.steps["skipped"] += 1  # the hints stay a step behind: harmless, but seen
        if requests > self.prior.row_slot.shape[0]:
            counters.steps["over capacity"] += 1
            return
        owners = self._owners(metadata, requests)
        before = (self.prior.admitted, self.prior.evicted, self.prior.refused)
        slots = self.prior.set_rows(owners)
        after = (self.prior.admitted, self.prior.evicted, self.prior.refused)
        for event, old, new in zip(("admitted", "evicted", "refused"), before, after, strict=True):
            counters.requests[event] += new - old
        tokens = int(metadata.num_tokens) - int(metadata.num_ctx_tokens)
        self.next_n = tokens // generations if generations else 1
        if 1 < self.next_n <= ROWS_PER_REQUEST:
            rows = self.draft_row_slot[:tokens].view(generations, self.next_n)
            rows.copy_(slots[contexts:].unsqueeze(1).expand_as(rows))
        dummy = sum(owner is None for owner in owners[contexts:]) * self.next_n
        counters.rows["dummy"] += dummy
        counters.rows["hinted"] += tokens - dummy
        self._note_contexts(metadata, owners[:contexts], counters)
        self.num_requests, self.num_contexts = requests, contexts
        self.batch = weakref.ref(metadata)

    def _owners(self, metadata: Any, requests: int) -> list[int | None]:
        """Request of each row group; None where the row must neither read nor write a hint."""
        owners: list[int | None] = [
            None if _is_dummy(request) else request for request in list(metadata.request_ids)[:requests]
        ]
        low, high = self.options.min_length, self.options.max_length
        if low is not None or high is not None:
            cached = metadata.kv_cache_params.num_cached_tokens_per_seq
            for i, (past, new) in enumerate(zip(cached, metadata.seq_lens.tolist(), strict=False)):
                if not (low or 0) <= past + new <= (past + new if high is None else high):
                    owners[i] = None
        return owners

    def _note_contexts(self, metadata: Any, owners: Sequence[int | None], counters: Counters) -> None:
        """Say which rows end a prompt chunk, and whose slot they seed. Eager steps only."""
        self.contexts = None
        if not owners:
            return
        ends = torch.cumsum(metadata.seq_lens[: len(owners)], 0).tolist()
        pairs = [
            (end - 1, slot)
            for end, owner in zip(ends, owners, strict=True)
            if owner is not None and (slot := self.prior.slot_of(owner)) >= 0
        ]
        if pairs:
            counters.requests["seeded"] += len(pairs)
            host = torch.tensor(pairs, dtype=torch.int64).t().contiguous()
            if self.device.type == "cuda":
                host = host.pin_memory()
            self.contexts = host.to(self.device, non_blocking=True).unbind(0)

    def row_slot(self, metadata: Any, next_n: int, rows: int) -> Tensor | None:
        """Slot of each row of a call, or None when this batch was not prepared that way.

        The draft steps of MTP run inside one step with one row per request and, once the prompt tokens
        are through, with every request of the batch in generation; so the layout is taken from the
        call and from the metadata as it is now.
        """
        if self.batch() is not metadata:
            return None
        start = int(metadata.num_contexts)
        if next_n == 1:
            return self.prior.row_slot[start : start + rows] if start + rows <= self.num_requests else None
        fits = next_n == self.next_n and rows == (self.num_requests - self.num_contexts) * next_n
        return self.draft_row_slot[:rows] if fits and start == self.num_contexts else None

    def measure(self) -> Measured:
        """Read hit ratio and guess misses of the last step from the device."""
        if self.stats is None:
            return Measured()
        rows = (self.num_requests - self.num_contexts) * self.next_n
        last = dict(zip(STATS_COLUMNS, self.stats[:, :rows].cpu().unbind(-1), strict=True))
        guessed = last["guess"] > 0
        misses = int((guessed & (last["guess_hit"] != 1)).sum())
        hits = last["hits"][last["hits"] > 0]  # a hint nothing of which is in the result was none
        ratio = float(hits.double().mean()) / self.prior.indices.shape[-1] if hits.numel() else None
        return Measured(ratio, hits.numel(), int(guessed.sum()), misses)


class LayerHook:
    """Connects the wrapped methods and the replaced op of one TensorRT-LLM process.

    Parameters
    ----------
    counters : Counters
    say : callable
        Takes a level (``info`` or ``warning``) and a line for the log.
    """

    def __init__(self, counters: Counters, say: Callable[[str, str], None]) -> None:
        self.counters = counters
        self._say = say
        self._states: weakref.WeakKeyDictionary[Any, HintState | Closed] = weakref.WeakKeyDictionary()
        self._local = threading.local()
        self._capturing = False
        self._broken: Closed | None = None
        counters.measure = self.measure

    def state_of(self, manager: Any) -> HintState | Closed | None:
        """What is known about a cache manager; None before its first step."""
        return self._states.get(manager)

    def wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DSAtrtllmAttentionMetadata.prepare``."""

        @functools.wraps(original)
        def prepare(metadata: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(metadata, *args, **kwargs)
            self._after_prepare(metadata)
            return result

        return prepare

    def wrap_indexer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Indexer.sparse_attn_indexer``."""
        names = list(inspect.signature(original).parameters)
        phase = names.index("is_generation") - 2 if "is_generation" in names else None

        @functools.wraps(original)
        def sparse_attn_indexer(indexer: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(indexer, metadata)
            outer, self._local.call = self._current(), call
            try:
                result = original(indexer, metadata, *args, **kwargs)
            finally:
                self._local.call = outer
            if phase is None or not _argument(args, kwargs, phase, "is_generation", None):
                self._seed(call, result)
            return result

        return sparse_attn_indexer

    def wrap_op(self, original: Any) -> DecodeOp:
        """Make the replacement of ``torch.ops.trtllm.indexer_topk_decode``."""
        return DecodeOp(original, self)

    def measure(self) -> Measured:
        """Device-side numbers of the state that served the last step."""
        if self._capturing:
            return Measured()  # reading from the device would invalidate the capture
        states = [state for state in self._states.values() if isinstance(state, HintState)]
        live = [state for state in states if state.batch() is not None]
        return live[-1].measure() if live else Measured()

    def run(self, call: Call, logits: Tensor, seq_lens: Tensor, indices: Tensor, next_n: int, k: int) -> str:
        """Compute one call with our op.

        Returns
        -------
        str
            Empty when done; else why the original has to do it, with nothing written.
        """
        state = call.state
        if isinstance(state, Closed):
            return state.reason
        if k != state.k:
            return "another k"
        if logits.device != state.device:
            return "another device"
        if logits.dim() != 2 or logits.stride(1) != 1:
            return "layout"
        rows = logits.shape[0]
        self._capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        row_slot = state.row_slot(call.metadata, next_n, rows)
        prior = None if row_slot is None else state.prior.layer(call.layer)
        stats = state.stats
        if stats is not None:
            stats = stats[call.layer, :rows] if rows <= stats.shape[1] else None
        with _nvtx(state.options.nvtx, call.layer):
            indexer_topk_decode(
                logits,
                seq_lens,
                k,
                next_n=next_n,
                out=indices[:, :k],
                prior=prior.indices if prior is not None and state.keeps_positions else None,
                row_slot=row_slot,
                prior_offset=state.options.hint_offset,
                guess_state=None if prior is None else prior.guess,
                stats=stats,
                path=state.options.path,
                max_ctas=state.options.max_ctas,
                pdl=state.programmatic_launch,
            )
        self.counters.calls[OURS, "hint" if row_slot is not None else "rows unknown"] += 1
        return ""

    def failed(self, what: str, error: Exception) -> str:
        """Log an unexpected error and name it for the counters."""
        self._say("warning", f"{what}: {type(error).__name__}: {error}")
        return f"error: {type(error).__name__}"

    def _current(self) -> Call | None:
        return getattr(self._local, "call", None)

    def _call(self, indexer: Any, metadata: Any) -> Call:
        manager = getattr(metadata, "kv_cache_manager", None)
        state = self._broken or (None if manager is None else self._states.get(manager))
        if state is None:
            state = Closed("batch not prepared")
        layer = 0
        if isinstance(state, HintState):
            layer = state.layer_offsets.get(indexer.layer_idx, -1)
            if layer < 0:
                state = Closed("layer not in the cache")
        return Call(state, metadata, layer)

    def _after_prepare(self, metadata: Any) -> None:
        manager = getattr(metadata, "kv_cache_manager", None)
        if (
            manager is None
            or self._broken
            or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        ):
            return
        self._capturing = False
        try:
            state = self._states.get(manager)
            if state is None:
                state = self._states[manager] = self._open(metadata, manager)
            if isinstance(state, HintState):
                state.update(metadata, self.counters)
                self._write_metrics()
        except Exception as error:  # an engine must not fail because of a hint
            self._broken = Closed(self.failed("refused", error))

    def _write_metrics(self) -> None:
        try:
            self.counters.write_if_due(environment.metrics_directory())
        except (OSError, ImportError) as error:
            self.failed("no metrics file", error)

    def _open(self, metadata: Any, manager: Any) -> HintState | Closed:
        mode = environment.mode()
        if mode is Mode.OFF:
            return Closed("not asked for")
        for point, instance in ((METADATA_OBJECT, metadata), (MANAGER_OBJECT, manager)):
            finding = check_object(point, instance)
            if not finding.good:
                return self._refuse(f"{point.name}: {finding.detail}")
        if any(ratio > 1 for ratio in getattr(metadata, "compress_ratios", None) or ()):
            return self._refuse("compressed indexer keys (DeepSeek-V4) are not supported")
        device = _first(metadata, "kv_lens_cuda_runtime", "kv_lens_cuda").device
        status = library_status()
        if device.type == "cuda" and not status.loaded:
            return self._refuse(f"the CUDA library is not usable: {status.reason}")
        state = HintState(metadata, manager, mode)
        mib = state.prior.nbytes / 2**20
        self._say(
            "info",
            f"on: {manager.num_local_layers} layers, k = {state.k}, {state.prior.num_slots} requests, "
            f"{mib:.0f} MiB of hints, path {state.options.path} on {device}",
        )
        return state

    def _refuse(self, reason: str) -> Closed:
        self._say("warning", f"refused: {reason}")
        return Closed(reason)

    def _seed(self, call: Call, result: Tensor) -> None:
        """Give the top-k of the last prompt row to the first decode step, on the device."""
        state, metadata = call.state, call.metadata
        if not isinstance(state, HintState) or state.batch() is not metadata or state.contexts is None:
            return
        skipped = getattr(metadata, "skip_indexer_for_ctx_reqs", False)
        if skipped or metadata.num_contexts == 0 or result.shape[1] < state.k:
            return
        rows, slots = state.contexts
        prior = state.prior.layer(call.layer)
        try:
            if state.keeps_positions:
                prior.indices.index_copy_(0, slots, result.index_select(0, rows)[:, : state.k])
            prior.guess.index_fill_(0, slots, UNKNOWN)
        except Exception as error:  # the first decode step does without
            self.failed("prompt not used as a hint", error)


class DecodeOp:
    """Callable in place of ``torch.ops.trtllm.indexer_topk_decode``; the rest is the original's."""

    def __init__(self, original: Any, hook: LayerHook) -> None:
        self._original = original
        self._hook = hook
        arguments = original.default._schema.arguments
        self._default_topk = next(a.default_value for a in arguments if a.name == "index_topk")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(
        self, logits: Tensor, seq_lens: Tensor, indices: Tensor, next_n: int, *args: Any, **kwargs: Any
    ) -> None:
        call = self._hook._current()
        k = _argument(args, kwargs, 0, "index_topk", self._default_topk)
        if call is None:
            reason = "not from the indexer"
        elif _argument(args, kwargs, 3, "compress_ratio", 1) != 1:
            reason = "compressed keys"
        elif _argument(args, kwargs, 1, "pre_idx", None) is not None and not _forced(call):
            reason = "TensorRT-LLM runs its own heuristic"
        else:
            try:
                reason = self._hook.run(call, logits, seq_lens, indices, next_n, k)
            except Exception as error:  # the original still can
                reason = self._hook.failed("fell back", error)
        if reason:
            self._hook.counters.calls[ORIGINAL, reason] += 1
            self._original(logits, seq_lens, indices, next_n, *args, **kwargs)


def _forced(call: Call) -> bool:
    return isinstance(call.state, HintState) and call.state.mode is Mode.FORCE


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(name, default)


def _first(instance: Any, *names: str) -> Any:
    return next(getattr(instance, name) for name in names if hasattr(instance, name))


def _is_dummy(request_id: int) -> bool:
    """Whether an id stands for padding, warm-up of a graph, or an idle attention-DP rank."""
    idle = sys.modules.get("tensorrt_llm._torch.pyexecutor.llm_request")
    return not 0 <= request_id < DUMMY_FROM or request_id == getattr(idle, "ATTENTION_DP_DUMMY_REQUEST_ID", 0)


@contextmanager
def _nvtx(enabled: bool, layer: int) -> Iterator[None]:
    if not enabled or not torch.cuda.is_available():
        yield
        return
    torch.cuda.nvtx.range_push(f"gvr_topk layer {layer}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
