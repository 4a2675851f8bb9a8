"""Our op in place of vLLM's prefill top-k, ``torch.ops._C.top_k_per_row_prefill``.

Every sparse indexer of vLLM calls this op once for each chunk of its prompts: through
``vllm._custom_ops.top_k_per_row_prefill`` or, in GLM-5-Next, from the op's namespace. Both ways look the op
up in that namespace at every call, so it is replaced there. Prefill needs no state, so it need not know the
layer or the requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.carry import PrefillCarry
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.contract import DTYPES
from gvr_topk.integrations._kit.counters import ORIGINAL, OURS
from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.verify import Selected, Verifier
from gvr_topk.integrations.vllm.backend import BackendSwitch
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.slices import DeferredScores
from gvr_topk.integrations.vllm.upstream import AUTO
from gvr_topk.ops import indexer_topk_prefill

REASON = "prefill"
"""Reason counted for calls that our op computes, and the beginning of the reasons of all other calls."""

SLICES = f"{REASON} slices"
"""Reason counted for calls whose scores came in slices."""


class PrefillCall(NamedTuple):
    """Arguments of the op, in its order."""

    logits: Any  # Tensor or DeferredScores
    row_starts: Tensor
    row_ends: Tensor
    indices: Tensor
    num_rows: int
    stride0: int
    stride1: int
    top_k: int


class PrefillOp:
    """Callable in place of the op, with the schema's parameter names; all attributes are the original's.

    `select` takes a `PrefillCall` and the original, and returns False when vLLM has to do it.
    """

    def __init__(self, original: Any, select: Callable[[PrefillCall, Any], bool]) -> None:
        self._original = original
        self._select = select

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(
        self,
        logits: Tensor,
        rowStarts: Tensor,
        rowEnds: Tensor,
        indices: Tensor,
        numRows: int,
        stride0: int,
        stride1: int,
        topK: int,
    ) -> None:
        call = PrefillCall(logits, rowStarts, rowEnds, indices, numRows, stride0, stride1, topK)
        if not self._select(call, self._original):
            run_original(call, self._original)


def run_original(call: PrefillCall, original: Any) -> None:
    """Run a call with vLLM's op, which is given deferred scores as many rows at once as vLLM would."""
    logits = call.logits
    if not isinstance(logits, DeferredScores):
        original(*call)
        return
    for part in logits.parts():
        scores = logits[part]
        rows = (call.row_starts[part], call.row_ends[part], call.indices[part], len(scores))
        original(scores, *rows, *scores.stride(), call.top_k)
        del scores  # before there are others


class PrefillHook:
    """Runs prefill calls of one vLLM process with our op."""

    def __init__(self, metrics: CallMetrics, mode: Mode, say: Say, verifier: Verifier | None = None) -> None:
        self._metrics = metrics
        self._say = say
        self._switch = BackendSwitch(mode, say, REASON)
        self._verifier = verifier
        self.backend: Any = AUTO
        self._local = threading.local()

    @property
    def takes_slices(self) -> bool:
        """Whether deferred scores would be selected from by our op."""
        return not self._switch.reason_against(self.backend)

    def select(self, call: PrefillCall, original: Any) -> bool:
        """Run one call with our op; `original`, vLLM's op, is to compare with.

        Returns False when vLLM has to do it; the reason is counted. vLLM then writes every place that we may
        have written.
        """
        reason = self._switch.reason_against(self.backend)
        if not reason and not _served(call):
            reason = "layout"
        counted = REASON
        if isinstance(call.logits, DeferredScores):
            counted = SLICES
            # The zeros of a carry that is made in a capture would be written by its replays alone.
            if capturing(call.logits.device):
                reason = reason or "captured"
        if not reason:
            try:
                self._run(call)
                if self._verifier is not None:
                    name = f"{REASON} top-k{counted.removeprefix(REASON)}"
                    self._verifier.check(name, lambda: run_original(call, original), _selected(call))
            except Exception as error:  # the original can still select
                reason = self._switch.fail(error)
        if reason:
            self._metrics.count(ORIGINAL, f"{REASON} {reason}")
            return False
        self._metrics.count(OURS, counted)
        self._switch.announce(lambda: f"prefill top-k with k = {call.top_k}")
        if counted == SLICES:
            self._say("info", f"on: {SLICES} of long prompts")
        return True

    def _run(self, call: PrefillCall) -> None:
        rows = call.num_rows
        windows = (call.row_starts[:rows], call.row_ends[:rows], call.top_k)
        out = call.indices[:rows]
        if not isinstance(call.logits, DeferredScores):
            indexer_topk_prefill(call.logits[:rows], *windows, out=out)
            return
        carry = self._carry(call)
        for column, scores in call.logits.slices():
            ends = column + scores.shape[1] == call.logits.shape[1]
            indexer_topk_prefill(scores, *windows, carry=carry, column=column, out=out if ends else None)
            del scores  # before there are others

    def _carry(self, call: PrefillCall) -> PrefillCarry:
        """Return the carry of this thread, empty, with room for a call."""
        carry: PrefillCarry | None = getattr(self._local, "carry", None)
        wanted = (call.num_rows, call.top_k, call.logits.device)
        if carry is None or carry.rows < wanted[0] or (carry.k, carry.words.device) != wanted[1:]:
            with torch.inference_mode(False):  # it outlives the mode that vLLM runs in
                carry = self._local.carry = PrefillCarry(*wanted)
        return carry


def _served(call: PrefillCall) -> bool:
    """Whether the op takes tensors like these."""
    logits, indices = call.logits, call.indices
    if logits.dim() != 2 or indices.dim() != 2:
        return False
    if logits.stride() != (call.stride0, call.stride1) or call.stride1 != 1:
        return False
    integers = (call.row_starts, call.row_ends, indices)
    return (
        logits.dtype in DTYPES
        and logits.shape[1] <= MAX_WIDTH
        and all(tensor.dtype == torch.int32 and tensor.stride(-1) == 1 for tensor in integers)
        and all(tensor.shape[0] >= call.num_rows for tensor in (logits, *integers))
        and indices.shape[1] >= call.top_k
    )


def _selected(call: PrefillCall) -> Selected:
    rows = call.num_rows
    scores: Any = call.logits if isinstance(call.logits, DeferredScores) else call.logits[:rows]
    return Selected(scores, call.indices[:rows, : call.top_k], call.row_starts[:rows])
