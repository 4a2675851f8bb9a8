"""State of each layer by request, for calls in which SGLang says whose rows it computes.

The top-k functions of SGLang are told neither the layer nor the requests. The indexer that calls them knows
both, so the hook around the indexer notes both for the time of its call.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.log import Say, one_line
from gvr_topk.state import TopkState

FORWARD_CONTEXT = "sglang.srt.model_executor.forward_context"

NO_STATE = (None, None)


class _Pass:
    """The slots of one batch, computed once for all its layers.

    The slots are computed on the device, and this computation must be captured into each CUDA graph that
    reads them. An indexer that is called a second time begins another pass of the same batch, as in the
    warm-up runs before a capture. The slots of an earlier pass must not be read then.
    """

    def __init__(self, batch: Any, capturing: bool) -> None:
        self.batch = weakref.ref(batch)
        self.capturing = capturing
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        # SGLang's request 0 stands for the padding of a graph: it gets slot -1, that is, none.
        self.row_slot = (batch.req_pool_indices - 1).to(torch.int32)

    def serves(self, batch: Any, indexer: Any, capturing: bool) -> bool:
        """Say whether a call continues this pass.

        It does so if the batch is the same, a graph is being captured or not as before, and the pass has not
        seen the indexer yet.
        """
        return self.batch() is batch and self.capturing == capturing and indexer not in self.seen


class Requests:
    """State of every indexer by SGLang's request index, and the batch that is being computed.

    A slot that is given to another request keeps what the previous request has left. This costs time in the
    first step of the new request and never changes a result.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._stateless = False
        self._current: tuple[Any, Any] | None = None
        self._states: weakref.WeakKeyDictionary[Any, TopkState] = weakref.WeakKeyDictionary()
        self._pass: _Pass | None = None

    def around_indexer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """AROUND hook of ``Indexer._get_topk_paged(self, forward_batch, ...)``; it computes nothing."""
        indexer, *rest = args
        outer = self._current
        self._current = (indexer, kwargs["forward_batch"] if "forward_batch" in kwargs else rest[0])
        try:
            return original(*args, **kwargs)
        finally:
            self._current = outer

    def rows(self, score: Tensor, k: int) -> tuple[TopkState | None, Tensor | None]:
        """Return state and slots of a call's rows; `NO_STATE` if the requests of the rows are not known."""
        if self._current is None or self._stateless:
            return NO_STATE
        indexer, batch = self._current
        try:
            if not _is_plain_decode(batch, score.shape[0]):
                return NO_STATE
            in_capture = capturing(score.device)
            state = self._state(indexer, batch, score, k, in_capture)
            return NO_STATE if state is None else (state, self._row_slot(indexer, batch, in_capture))
        except Exception as error:  # without a state the result is the same
            self._stateless = True
            self._say("warning", f"without state from now on: {one_line(error)}")
            return NO_STATE

    def _state(self, indexer: Any, batch: Any, score: Tensor, k: int, capturing: bool) -> TopkState | None:
        state = self._states.get(indexer)
        # A state that is allocated during a capture would be filled again by every replay and never remember
        # anything. SGLang runs each batch size before it captures it, so the state exists by then.
        if state is None and not capturing:
            # Tensors that are made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                state = TopkState(_request_slots(batch), k, score.device, keep_indices=False)
            self._states[indexer] = state
            self._say("info", f"state from step to step of {state.slots} requests")
        return state

    def _row_slot(self, indexer: Any, batch: Any, capturing: bool) -> Tensor:
        if self._pass is None or not self._pass.serves(batch, indexer, capturing):
            self._pass = _Pass(batch, capturing)
        self._pass.seen.add(indexer)
        return self._pass.row_slot


def _is_plain_decode(batch: Any, rows: int) -> bool:
    """Whether each row is the only row of its request: rows that share a request would race for its slot."""
    drafts = getattr(batch, "spec_info", None) is not None
    return batch.forward_mode.is_decode() and not drafts and batch.req_pool_indices.shape[0] == rows


def _request_slots(batch: Any) -> int:
    """Return the number of request indices that SGLang can give out, padding included."""
    pool = getattr(batch, "req_to_token_pool", None)
    if pool is None:  # newer versions publish it beside the batch
        pool = sys.modules[FORWARD_CONTEXT].get_req_to_token_pool()
    return int(pool.req_to_token.shape[0])
