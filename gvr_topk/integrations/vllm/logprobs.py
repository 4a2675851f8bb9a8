"""`gvr_topk.sampling.topk_logprobs` in place of vLLM's ``compute_topk_scores``.

The V2 model runner calls that function for the log-probabilities of sampled tokens, of tokens after drafts,
and of prompts: a top-k, a log-softmax of the chosen tokens, and the ranks of the sampled ones, each a pass
over the vocabulary or two. `topk_logprobs` reads each row once, and is the same in every batch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.constants import MAX_RANKED_TOKENS
from gvr_topk.contract import DTYPES
from gvr_topk.integrations._kit.counters import ORIGINAL, OURS
from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.switch import Switch
from gvr_topk.integrations._kit.verify import Differs, Verifier
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.upstream import ENGINE, OUTPUTS_MODULE
from gvr_topk.sampling import TopkLogprobs, topk_logprobs

REASON = "logprobs"
"""Reason counted for calls that our op computes, and the beginning of the reasons of all other calls."""

TOLERANCE = 1e-4
"""By how much, and by what share of itself, a log-probability of vLLM's may differ: its sums are in fp32."""


class ScoresCall(NamedTuple):
    """Arguments of ``compute_topk_scores``, in its order."""

    logits: Tensor
    num_logprobs: int
    sampled_token_ids: Tensor
    cu_num_logits: list[int] | Tensor | None = None
    logprob_token_ids_state: Any = None
    expanded_idx_mapping: Tensor | None = None
    max_per_req_token_ids: int = 0
    logits_mode: bool = False


class LogprobsHook:
    """Computes log-probabilities of one vLLM process with our op.

    Parameters
    ----------
    metrics : CallMetrics
    say : Say
    """

    def __init__(self, metrics: CallMetrics, say: Say) -> None:
        self._metrics = metrics
        self._switch = Switch(ENGINE.name, say, "log-probability")
        self._verifier = Verifier.if_asked_for(ENGINE.name, say)

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compute_topk_scores``."""

        @functools.wraps(original)
        def compute_topk_scores(*args: Any, **kwargs: Any) -> Any:
            scores = self._scores(lambda: original(*args, **kwargs), args, kwargs)
            return original(*args, **kwargs) if scores is None else scores

        return compute_topk_scores

    def _scores(self, original: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Compute one call with our op; None when vLLM has to do it, and the reason is counted."""
        reason = self._switch.failed
        if not reason:
            try:
                call = ScoresCall(*args, **kwargs)
                reason = _reason_against(call)
                if not reason:
                    scores = self._run(call, original)
            except Exception as error:  # the original can still compute
                reason = self._switch.fail(error)
        if reason:
            self._metrics.count(ORIGINAL, f"{REASON} {reason}")
            return None
        self._metrics.count(OURS, REASON)
        self._switch.announce(lambda: f"log-probabilities of {call.num_logprobs} and the sampled token")
        return scores

    def _run(self, call: ScoresCall, original: Callable[[], Any]) -> Any:
        ours = topk_logprobs(call.logits, call.num_logprobs, call.sampled_token_ids)
        if self._verifier is not None and self._verifier.compares(REASON, call.logits.device):
            self._verifier.compare(REASON, original, lambda theirs: _agree(call.logits, ours, theirs))
        starts = call.cu_num_logits
        on_device = isinstance(starts, Tensor)
        return sys.modules[OUTPUTS_MODULE].LogprobsTensors(
            logprob_token_ids=ours.ids,
            logprobs=ours.logprobs,
            selected_token_ranks=ours.ranks,
            cu_num_generated_tokens=None if on_device else starts,
            cu_num_generated_tokens_tensor=starts if on_device else None,
        )


def _reason_against(call: ScoresCall) -> str:
    """Return why vLLM has to do a call; empty when our op can do it."""
    if call.logits_mode:
        return "are logits"
    if call.max_per_req_token_ids:
        return "of given tokens"
    if call.num_logprobs > MAX_RANKED_TOKENS:
        return "of too many tokens"
    logits = call.logits
    plain = logits.dim() == 2 and logits.stride(1) == 1 and logits.dtype in DTYPES
    return "" if plain else "layout"


def _agree(logits: Tensor, ours: TopkLogprobs, theirs: Any) -> bool:
    """Return whether a row was compared; raise `Differs` if one has another result.

    Rows with NaN are not compared: vLLM has no log-probabilities there. Of equal logits either may be named.
    Nor is the rank of a token at -inf: vLLM counts places behind the row, too, up to a multiple of 8,192.
    """
    judged = ~theirs.logprobs.isnan().any(1)
    values, other = (logits.gather(1, ids) for ids in (ours.ids, theirs.logprob_token_ids.long()))
    twice = ours.ids[:, 1:].sort(1).values.diff().eq(0)
    close = torch.isclose(ours.logprobs, theirs.logprobs, rtol=TOLERANCE, atol=TOLERANCE)
    for what, wrong in (
        ("a token is named twice", twice),
        ("a token has another logit", values != other),
        ("a log-probability differs", ~close),
        (
            "the rank differs",
            (ours.ranks != theirs.selected_token_ranks)[:, None] & (values[:, :1] > -torch.inf),
        ),
    ):
        rows = (wrong.any(1) & judged).nonzero()
        if len(rows):
            raise Differs(f"row {int(rows[0])} of {len(logits)}: {what}")
    return bool(judged.any())
