"""The hook in place of vLLM's top-k, and the hooks that find out the layer and the requests of a call.

``SparseIndexerTopk.forward`` is told neither the layer nor the requests. So the metadata builder's ``build``
is wrapped to note, once per step and on the host, which request each row belongs to, and
``sparse_attn_indexer`` is wrapped to note the layer. Where ``sparse_attn_indexer`` runs as an op, the op
holds the unwrapped function. So the first function that it calls is wrapped, too: the one that resolves the
layer's name.

Inside a captured region the hook copies nothing, reads nothing back and allocates nothing: every tensor the
op takes exists since the first ``build``, at an address that never changes.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.integrations._kit.counters import ORIGINAL, OURS
from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.environment import METRICS_DIR_VLLM, Mode
from gvr_topk.integrations._kit.log import Say, one_line
from gvr_topk.integrations._kit.replacement import readable
from gvr_topk.integrations._kit.signatures import argument, check_object
from gvr_topk.integrations._kit.verify import Selected, Verifier
from gvr_topk.integrations.vllm.backend import BackendSwitch, backend_of
from gvr_topk.integrations.vllm.candidates import CandidatesHook
from gvr_topk.integrations.vllm.dcp import DcpHook
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.prefill import PrefillHook
from gvr_topk.integrations.vllm.rows import ATTRIBUTE, RequestStates, Rows
from gvr_topk.integrations.vllm.slices import SlicesHook
from gvr_topk.integrations.vllm.upstream import (
    BUILDER_OBJECT,
    COMMON_OBJECT,
    CONTEXT_MODULE,
    ENGINE,
    METADATA_OBJECT,
)
from gvr_topk.ops import indexer_topk_decode

ALIGNMENT = 16
"""In bytes. The kernels read a row faster if the size of its visible part is a multiple of this."""


class Call(NamedTuple):
    """Arguments of ``SparseIndexerTopk.forward``, in its order."""

    logits: Tensor
    seq_lens: Tensor
    next_n: int
    topk_indices: Tensor
    topk_tokens: int
    max_seq_len: int


class LayerHook:
    """Connects the wrapped functions of one vLLM process."""

    def __init__(self, metrics: CallMetrics, mode: Mode, say: Say) -> None:
        self._metrics = metrics
        self._say = say
        self._switch = BackendSwitch(mode, say)
        self._verifier = Verifier.if_asked_for(ENGINE.name, say)
        self.candidates = CandidatesHook(metrics, mode, say)
        self.dcp: DcpHook | None = None  # where it is asked for
        self.slices = SlicesHook(lambda: getattr(self._local, "layer", None), say)
        self.prefill = PrefillHook(metrics, mode, say, self.slices.note_selection)
        self._states: weakref.WeakKeyDictionary[Any, RequestStates | None] = weakref.WeakKeyDictionary()
        self._layers: set[str] = set()
        self._local = threading.local()
        self._stateless = False

    def state_of(self, builder: Any) -> RequestStates | None:
        """Return the state of a builder's layers; None if there is none, as before its first ``build``."""
        return self._states.get(builder)

    def wrap_build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``DeepseekV32IndexerMetadataBuilder.build``."""

        @functools.wraps(original)
        def build(builder: Any, *args: Any, **kwargs: Any) -> Any:
            # The setting is about the decode top-k. Whoever chose another one wants vLLM's others, too.
            self.prefill.backend = self.candidates.backend = backend_of(builder)
            if self.dcp is not None:
                self.dcp.note_builder(builder)
            self._layers.update(getattr(builder, "layer_names", ()))
            make = functools.partial(original, builder, *args, **kwargs)
            metadata = self.slices.build(builder, make) if self.prefill.takes_slices else make()
            self._after_build(builder, argument(args, kwargs, 1, "common_attn_metadata", None), metadata)
            return metadata

        return build

    def wrap_indexer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``sparse_attn_indexer`` where a model calls it as a function."""

        @functools.wraps(original)
        def sparse_attn_indexer(*args: Any, **kwargs: Any) -> Any:
            self._note_layer(argument(args, kwargs, 1, "k_cache_prefix", None))
            try:
                return original(*args, **kwargs)
            finally:
                self._local.layer = None

        return sparse_attn_indexer

    def wrap_resolve(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``_resolve_layer_name``, which ``sparse_attn_indexer`` calls, also within an op."""

        @functools.wraps(original)
        def _resolve_layer_name(*args: Any, **kwargs: Any) -> Any:
            name = original(*args, **kwargs)
            self._note_layer(name)
            return name

        return _resolve_layer_name

    def wrap_top_k(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``SparseIndexerTopk.forward``."""

        @functools.wraps(original)
        def forward(stage: Any, *args: Any, **kwargs: Any) -> Any:
            call = Call(*args, **kwargs)
            return None if self.select(stage, call, original) else original(stage, *call)

        return forward

    def select(self, stage: Any, call: Call, original: Callable[..., Any]) -> bool:
        """Run one selection with our op; `original` is vLLM's ``SparseIndexerTopk.forward``, to compare.

        Returns False when vLLM has to do it; the reason is counted. vLLM then writes every place that we may
        have written.
        """
        layer, self._local.layer = getattr(self._local, "layer", None), None
        reason = self._reason_against(stage, call)
        rows = None
        if not reason:
            try:
                reason = self._switch.reason_against_auto(stage, call.logits, call.topk_tokens)
                if not reason:
                    rows = self._rows(call, layer)
                    selected = _run(call, rows, layer)
                    if self._verifier is not None:
                        self._verifier.check("decode top-k", lambda: original(stage, *call), selected)
            except Exception as error:  # the original can still select
                reason = self._switch.fail(error)
        if reason:
            self._metrics.count(ORIGINAL, reason)
        else:
            self._metrics.count(OURS, "no_state" if rows is None else "hint")
            self._switch.announce(lambda: _described(call, rows))
        return not reason

    def _reason_against(self, stage: Any, call: Call) -> str:
        """Return why vLLM has to do this call; empty when our op can do it."""
        reason = self._switch.reason_against(getattr(stage, "_backend", None))
        if reason:
            return reason
        integers = call.seq_lens.dtype == torch.int32 and call.topk_indices.dtype == torch.int32
        return "" if integers and readable(call.logits) else "layout"

    def _rows(self, call: Call, layer: str | None) -> Rows | None:
        """Return which request each row of a call belongs to; None if that is not known."""
        if layer is None or self._stateless:
            return None
        by_layer = sys.modules[CONTEXT_MODULE].get_forward_context().attn_metadata
        metadata = by_layer.get(layer) if isinstance(by_layer, dict) else None
        rows: Rows | None = getattr(metadata, ATTRIBUTE, None)
        if rows is None or layer not in rows.requests:
            return None
        return rows if rows.fit(call.logits.shape[0], call.seq_lens, call.next_n) else None

    def _note_layer(self, name: Any) -> None:
        # Not all names that are passed here are names of indexers.
        if isinstance(name, str) and name in self._layers:
            self._local.layer = name

    def _after_build(self, builder: Any, common: Any, metadata: Any) -> None:
        try:
            if not self._switch.failed and not self._stateless:
                self._prepare(builder, common, metadata)
        except Exception as error:  # the op runs without state
            self._stateless = True
            self._say("warning", f"without state from now on: {one_line(error)}")
        self._metrics.counters.write_if_due(METRICS_DIR_VLLM, self._say)

    def _prepare(self, builder: Any, common: Any, metadata: Any) -> None:
        if builder not in self._states:
            self._states[builder] = self._open(builder, common, metadata)
        requests = self._states[builder]
        if requests is not None and not capturing(requests.slots.device):
            setattr(metadata, ATTRIBUTE, requests.update(common, metadata, self._metrics.counters))

    def _open(self, builder: Any, common: Any, metadata: Any) -> RequestStates | None:
        for point, instance in (
            (BUILDER_OBJECT, builder),
            (METADATA_OBJECT, metadata),
            (COMMON_OBJECT, common),
        ):
            finding = check_object(point, instance)
            if not finding.good:
                raise LookupError(f"{point.name}: {finding.detail}")
        config = builder.vllm_config
        if not hasattr(common, "req_idx") or getattr(config, "use_v2_model_runner", True) is False:
            self._say("info", "without state: this model runner does not say which request a row belongs to")
            return None
        requests = int(config.scheduler_config.max_num_seqs)
        drafts = int(getattr(getattr(config, "speculative_config", None), "num_speculative_tokens", 0) or 0)
        graphs = getattr(config, "compilation_config", None)
        padded = int(getattr(graphs, "max_cudagraph_capture_size", 0) or 0)
        rows = max(requests * (1 + drafts), padded)
        states = RequestStates(builder.layer_names, requests, rows, builder.device)
        self._say("info", f"state: {states}")
        return states


def _described(call: Call, rows: Rows | None) -> str:
    state = "without state in this call" if rows is None else f"state of {rows.requests}"
    return f"decode top-k with k = {call.topk_tokens}, {state}"


def _run(call: Call, rows: Rows | None, layer: str | None) -> Selected:
    logits = visible(call.logits, call.max_seq_len)
    out = call.topk_indices[: logits.shape[0]]
    indexer_topk_decode(
        logits,
        call.seq_lens.reshape(-1),
        call.topk_tokens,
        next_n=call.next_n,
        out=out,
        state=None if rows is None or layer is None else rows.requests.state(layer),
        row_slot=None if rows is None else rows.slots,
    )
    return Selected(logits, out)


def visible(logits: Tensor, max_seq_len: int) -> Tensor:
    """Return a view of the columns that rows of this call can have: the kernel is planned by the width.

    During a capture all columns stay, because the longest row of a later step is not known.
    """
    if capturing(logits.device):
        return logits
    step = ALIGNMENT // logits.element_size()
    wanted = -(-max(max_seq_len, 1) // step) * step
    return logits[:, : min(wanted, logits.shape[1])]
