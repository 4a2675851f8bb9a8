"""Our op in place of vLLM's prefill top-k, ``torch.ops._C.top_k_per_row_prefill``.

Every sparse indexer of vLLM calls this op once for each chunk of its prompts: through
``vllm._custom_ops.top_k_per_row_prefill`` or, in GLM-5-Next, from the op's namespace. Both ways look the op
up in that namespace at every call, so it is replaced there. Prefill needs no state, so it need not know the
layer or the requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.carry import PrefillCarry
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.op_in_place import OpInPlace
from gvr_topk.integrations._kit.replacement import Replacement, readable
from gvr_topk.integrations._kit.verify import Selected
from gvr_topk.integrations.vllm.backend import BackendSwitch
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.slices import DeferredScores
from gvr_topk.integrations.vllm.upstream import AUTO, ENGINE
from gvr_topk.ops import indexer_topk_prefill

SLICES = "prefill slices"
"""Reason counted for calls whose scores came in slices."""


class PrefillCall(NamedTuple):
    """Arguments of the op, in its order, with the names of its schema."""

    logits: Any  # Tensor or DeferredScores
    rowStarts: Tensor
    rowEnds: Tensor
    indices: Tensor
    numRows: int
    stride0: int
    stride1: int
    topK: int


class PrefillOp(OpInPlace):
    """Callable in place of the op; `results` are those of a `Replacement`."""

    def __init__(self, original: Any, results: Callable[..., Any]) -> None:
        super().__init__(original)
        self._results = results

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        def original() -> None:
            _run_original(PrefillCall(*args, **kwargs), self._original)

        if self._results(original, args, kwargs) is None:
            original()


def _run_original(call: PrefillCall, original: Any) -> None:
    """Run a call with vLLM's op, which is given deferred scores as many rows at once as vLLM would."""
    logits = call.logits
    if not isinstance(logits, DeferredScores):
        original(*call)
        return
    for part in logits.parts():
        scores = logits[part]
        rows = (call.rowStarts[part], call.rowEnds[part], call.indices[part], len(scores))
        original(scores, *rows, *scores.stride(), call.topK)
        del scores  # before there are others


class PrefillHook(Replacement[PrefillCall]):
    """Runs prefill calls of one vLLM process with our op; `note` is called before each."""

    arguments = PrefillCall
    reason = kind = "prefill"

    def __init__(self, metrics: CallMetrics, mode: Mode, say: Say, note: Callable[[], None]) -> None:
        super().__init__(ENGINE.name, metrics.count, say)
        self._switch: BackendSwitch = BackendSwitch(mode, say, self.kind)
        self._note = note
        self.backend: Any = AUTO
        self._local = threading.local()

    @property
    def takes_slices(self) -> bool:
        """Whether deferred scores would be selected from by our op."""
        return not self._switch.reason_against(self.backend)

    def wrap(self, original: Any) -> PrefillOp:
        return PrefillOp(original, self.results)

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PrefillCall:
        self._note()
        return PrefillCall(*args, **kwargs)

    def reason_against(self, call: PrefillCall) -> str:
        reason = self._switch.reason_against(self.backend)
        if not reason and not _served(call):
            reason = "layout"
        # The zeros of a carry that is made in a capture would be written by its replays alone.
        if not reason and isinstance(call.logits, DeferredScores) and capturing(call.logits.device):
            reason = "captured"
        return reason

    def run(self, call: PrefillCall, original: Callable[[], Any]) -> Tensor:
        scores, rows = call.logits, call.numRows
        windows = (call.rowStarts[:rows], call.rowEnds[:rows], call.topK)
        out = call.indices[:rows]
        if isinstance(scores, DeferredScores):
            carry = self._carry(call)
            for column, part in scores.slices():
                ends = column + part.shape[1] == scores.shape[1]
                indexer_topk_prefill(part, *windows, carry=carry, column=column, out=out if ends else None)
                del part  # before there are others
        else:
            scores = scores[:rows]
            indexer_topk_prefill(scores, *windows, out=out)
        if self.verifier is not None:
            name = "prefill top-k" + self.counted(call).removeprefix(self.reason)
            self.verifier.check(name, original, Selected(scores, out[:, : call.topK], windows[0]))
        if scores is call.logits:
            self.say("info", f"on: {SLICES} of long prompts")
        return out

    def counted(self, call: PrefillCall) -> str:
        return SLICES if isinstance(call.logits, DeferredScores) else self.reason

    def announcement(self, call: PrefillCall) -> str:
        return f"prefill top-k with k = {call.topK}"

    def _carry(self, call: PrefillCall) -> PrefillCarry:
        """Return the carry of this thread, empty, with room for a call."""
        carry: PrefillCarry | None = getattr(self._local, "carry", None)
        wanted = (call.numRows, call.topK, call.logits.device)
        if carry is None or carry.rows < wanted[0] or (carry.k, carry.words.device) != wanted[1:]:
            with torch.inference_mode(False):  # it outlives the mode that vLLM runs in
                carry = self._local.carry = PrefillCarry(*wanted)
        return carry


def _served(call: PrefillCall) -> bool:
    """Whether the op takes tensors like these."""
    logits, indices = call.logits, call.indices
    if not readable(logits) or logits.stride() != (call.stride0, call.stride1) or indices.dim() != 2:
        return False
    for tensor in (call.rowStarts, call.rowEnds, indices):
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1 or tensor.shape[0] < call.numRows:
            return False
    rows, width = logits.shape
    return bool(rows >= call.numRows and width <= MAX_WIDTH and indices.shape[1] >= call.topK)
