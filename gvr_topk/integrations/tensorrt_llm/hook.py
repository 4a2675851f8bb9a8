"""The hook around the indexer of each layer, and in place of its top-k.

TensorRT-LLM's top-k is told neither the layer nor the requests. So the enclosing call of
``Indexer.sparse_attn_indexer`` is wrapped to note layer and batch, and ``prepare`` of the batch metadata is
wrapped to note, once per step and on the host, which request each row belongs to. The selection itself is
replaced as `gvr_topk.integrations.tensorrt_llm.selection` describes.

Inside a captured region the hook copies nothing and reads nothing back, and allocates nothing: every tensor
the op takes exists since the first step, at an address that never changes.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.counters import ORIGINAL, OURS, Counters, Measured
from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import Say, one_line
from gvr_topk.integrations._kit.signatures import argument, check_object
from gvr_topk.integrations._kit.switch import Switch
from gvr_topk.integrations._kit.verify import Selected, Verifier
from gvr_topk.integrations.tensorrt_llm.hint_state import NO_LAYER, HintState, first_attribute
from gvr_topk.integrations.tensorrt_llm.selection import DecodeOp, Selection, wrap_top_k
from gvr_topk.integrations.tensorrt_llm.upstream import MANAGER_OBJECT, METADATA_OBJECT, NAME
from gvr_topk.ops import indexer_topk_decode
from gvr_topk.policy import no_kernels_reason

UNSEEN = "an op that is not replaced"
OUTSIDE = "not from the indexer"

ManagerState = HintState | str
"""What is kept for a cache manager, or why its calls are left to TensorRT-LLM."""


@dataclass(slots=True)
class IndexerCall:
    """The indexer call in progress on this thread."""

    state: ManagerState
    metadata: Any
    layer: int
    selected: bool = False
    """Whether the selection of its decode rows reached our hook."""


class LayerHook:
    """Connects the wrapped methods and the replaced selection of one TensorRT-LLM process.

    Attributes
    ----------
    before_first_step : callable
        Called once, at the first ``prepare``, to patch what could not be patched when the DSA module was
        imported.
    """

    def __init__(self, counters: Counters, say: Say) -> None:
        self.counters = counters
        self.before_first_step: Callable[[], None] | None = None
        self._say = say
        self._switch = Switch(NAME, say)
        self._verifier: Verifier | None = None
        self._states: weakref.WeakKeyDictionary[Any, ManagerState] = weakref.WeakKeyDictionary()
        self._prepared: tuple[Callable[[], Any], ManagerState | None] = (lambda: None, None)
        self._local = threading.local()
        self._capturing = False
        self._has_gpu: bool | None = None
        counters.measure = self.measure

    def state_of(self, manager: Any) -> ManagerState | None:
        """Return what is known about a cache manager; None before its first step."""
        return self._states.get(manager)

    def wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DSAtrtllmAttentionMetadata.prepare``."""

        @functools.wraps(original)
        def prepare(metadata: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(metadata, *args, **kwargs)
            if self.before_first_step is not None:
                connect, self.before_first_step = self.before_first_step, None
                connect()
            self._after_prepare(metadata)
            return result

        return prepare

    def wrap_indexer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Indexer.sparse_attn_indexer``."""
        names = list(inspect.signature(original).parameters)
        phase = names.index("is_generation") - 2 if "is_generation" in names else None

        @functools.wraps(original)
        def sparse_attn_indexer(indexer: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            generation = None if phase is None else argument(args, kwargs, phase, "is_generation", None)
            call = self._open_call(indexer, metadata)
            state = call.state
            if isinstance(state, HintState):
                self._note_accepted(state, metadata)
            outer, self._local.call = getattr(self._local, "call", None), call
            try:
                result = original(indexer, metadata, *args, **kwargs)
            finally:
                self._local.call = outer
            if isinstance(state, HintState):
                if generation is not False and not call.selected and _selects(metadata):
                    self._passed_by()
                if not generation:
                    self._seed(state, call, result)
            return result

        return sparse_attn_indexer

    def wrap_op(self, original: Any) -> DecodeOp:
        """Make the replacement of ``torch.ops.trtllm.indexer_topk_decode``."""
        return DecodeOp(original, self.select)

    def wrap_top_k(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``TopK._forward_decode``."""
        return wrap_top_k(original, self.select)

    def measure(self) -> Measured:
        """Device-side numbers of the state that served the last step."""
        if self._capturing:
            return Measured()  # reading from the device would invalidate the capture
        states = [state for state in self._states.values() if isinstance(state, HintState)]
        live = [state for state in states if state.batch() is not None]
        return live[-1].measure() if live else Measured()

    def select(self, selection: Selection, original: Callable[[], Any]) -> bool:
        """Run one selection with our op; return False, and count the reason, when TensorRT-LLM has to do it.

        TensorRT-LLM then writes every place that we may have written. `original` lets it select, to compare.
        """
        call: IndexerCall | None = getattr(self._local, "call", None)
        if call is None:
            reason = self._outside()
        else:
            call.selected = True
            reason = self._reason_against(call, selection)
            if not reason:
                try:
                    self._run(call, selection, original)
                except Exception as error:  # the original can still select
                    reason = self._switch.fail(error)
        if reason:
            self.counters.calls[ORIGINAL, reason] += 1
        return not reason

    def _outside(self) -> str:
        """Say once that a sparse backend has an indexer of its own, and return the reason for the counters.

        Such a backend (CSA2) also selects blocks of candidates, or sorts what was selected. Our op would be
        exact there, too, but has no state for it, and never ran in it.
        """
        if any(isinstance(state, HintState) for state in self._states.values()):
            self._say(
                "warning",
                "not in use: a sparse backend of TensorRT-LLM selects in an indexer of its own, outside of "
                "Indexer.sparse_attn_indexer",
            )
        return OUTSIDE

    def _reason_against(self, call: IndexerCall, selection: Selection) -> str:
        """Return why TensorRT-LLM has to do this call; empty when our op can do it."""
        state = call.state
        if isinstance(state, str):
            return state
        if selection.native and state.mode is not Mode.FORCE:
            reason = f"TensorRT-LLM runs {selection.native}"
            self._say(
                "warning", f"not in use: {reason}. {environment.ENABLE_TRTLLM}=force runs gvr_topk instead"
            )
            return reason
        if selection.k != state.k:
            return "another k"
        if selection.logits.device != state.device:
            return "another device"
        if selection.logits.dim() != 2 or selection.logits.stride(1) != 1:
            return "layout"
        return ""

    def _run(self, call: IndexerCall, selection: Selection, original: Callable[[], Any]) -> None:
        state = call.state
        assert isinstance(state, HintState)
        logits, k, next_n, layer = selection.logits, selection.k, selection.next_n, call.layer
        options, rows = state.options, logits.shape[0]
        self._capturing = capturing(logits.device)
        slots = None if layer == NO_LAYER else state.row_slot(call.metadata, next_n, rows)
        stats = state.stats
        if stats is not None:
            stats = stats[layer, :rows] if layer != NO_LAYER and rows <= stats.shape[1] else None
        out = selection.indices
        with _nvtx(options.nvtx, layer):
            indexer_topk_decode(
                logits,
                selection.seq_lens,
                k,
                next_n=next_n,
                compress_ratio=selection.compress_ratio,
                out=out if out.shape[1] == k else out[:, :k],
                state=None if slots is None else state.requests.layer(layer),
                row_slot=slots,
                next_state=None if slots is None else state.next_rows(layer, next_n, rows),
                path=options.path,
                max_ctas=options.max_ctas,
                pdl=state.programmatic_launch,
                hint_offset=options.hint_offset,
                stats=stats,
            )
        if self._verifier is not None:
            self._verifier.check("decode top-k", original, Selected(logits, out[:, :k]))
        self.counters.calls[OURS, "no_state" if slots is None else "hint"] += 1
        if not state.announced:  # only now, because a first step may not reach our hook
            state.announced = True
            self._switch.announce(lambda: str(state))

    def _open_call(self, indexer: Any, metadata: Any) -> IndexerCall:
        manager = getattr(metadata, "kv_cache_manager", None)
        state = self._switch.failed or (None if manager is None else self._states.get(manager))
        if state is None:  # MTP's draft loop has put a cache manager of its own into the metadata
            batch, prepared = self._prepared
            state = prepared if batch() is metadata else None
        if not isinstance(state, HintState):
            return IndexerCall(state or "batch not prepared", metadata, NO_LAYER)
        return IndexerCall(state, metadata, state.layer_of(manager, indexer.layer_idx))

    def _passed_by(self) -> None:
        """Count and log that decode rows were selected by something that is not hooked."""
        self.counters.calls[ORIGINAL, UNSEEN] += 1
        self._say(
            "warning",
            f"not in use: TensorRT-LLM selects with {UNSEEN}, also with {environment.ENABLE_TRTLLM}=force. "
            "Remove use_cute_dsl_topk from sparse_attention_config to run gvr_topk instead",
        )

    def _after_prepare(self, metadata: Any) -> None:
        if self._has_gpu is None:
            self._has_gpu = torch.cuda.is_available()
        if self._has_gpu and torch.cuda.is_current_stream_capturing():
            return
        self._capturing = False
        manager = getattr(metadata, "kv_cache_manager", None)
        try:
            if manager is not None and not self._switch.failed:
                self._prepare(metadata, manager)
            self.counters.write_if_due(environment.METRICS_DIR_TRTLLM, self._say)
        except Exception as error:  # an engine must not fail because of a hint
            self._switch.fail(error, "refused")

    def _prepare(self, metadata: Any, manager: Any) -> None:
        state = self._states.get(manager)
        if state is None:
            state = self._states[manager] = self._open_manager(metadata, manager)
        self._prepared = weakref.ref(metadata), state
        if isinstance(state, HintState):
            state.update(metadata, self.counters)
            if state.waited and not state.announced:
                # A log without any line looks like a missing wheel.
                what = f"no row is longer than index_topk = {state.k} so far"
                self._say("info", f"waiting: {what}, and TensorRT-LLM selects nothing in such rows")

    def _open_manager(self, metadata: Any, manager: Any) -> ManagerState:
        mode = environment.mode()
        if mode is Mode.OFF:
            return "not asked for"
        if self._verifier is None:
            self._verifier = Verifier.if_asked_for(NAME, self._say)
        for point, instance in ((METADATA_OBJECT, metadata), (MANAGER_OBJECT, manager)):
            finding = check_object(point, instance)
            if not finding.good:
                return self._refuse(f"{point.name}: {finding.detail}")
        device = first_attribute(metadata, "kv_lens_cuda_runtime", "kv_lens_cuda").device
        if device.type == "cuda" and (reason := no_kernels_reason(device)):
            return self._refuse(reason)
        return HintState(metadata, manager, mode)

    def _refuse(self, reason: str) -> str:
        self._say("warning", f"refused: {reason}")
        return reason

    def _note_accepted(self, state: HintState, metadata: Any) -> None:
        """Note how many draft rows TensorRT-LLM has accepted, if it tells."""
        had = state.next_state is not None
        try:
            wrong = state.note_accepted(metadata)
        except Exception as error:  # the last row's state is used instead, accepted or not
            self._say("warning", f"mtp_num_accepted is not used: {one_line(error)}")
            return
        if wrong:
            self._say("warning", f"mtp_num_accepted is not used: {wrong}")
        if state.next_state is not None and not had:
            mib = state.next_state.nbytes / 2**20
            self._say("info", f"drafts: a state is the last accepted row's, for {mib:.1f} MiB more")

    def _seed(self, state: HintState, call: IndexerCall, result: Tensor) -> None:
        try:
            state.seed(call.layer, call.metadata, result)
        except Exception as error:  # the first decode step then has no hint
            self._say("warning", f"prompt not used as a hint: {one_line(error)}")


def _selects(metadata: Any) -> bool:
    """Whether the generation rows of a batch need a selection of their own in this call."""
    shared = getattr(metadata, "in_mtp_draft_loop", False) and getattr(metadata, "indexer_skip_topk", False)
    skipped = getattr(metadata, "skip_indexer_for_gen_reqs", False)
    return int(metadata.num_generations) > 0 and not skipped and not shared


def _nvtx(enabled: bool, layer: int) -> AbstractContextManager[None]:
    if not enabled or not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.nvtx.range(f"gvr_topk layer {layer}")
