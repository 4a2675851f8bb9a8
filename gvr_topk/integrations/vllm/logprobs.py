"""`gvr_topk.sampling.topk_logprobs` in place of vLLM's ``compute_topk_scores``.

The V2 model runner calls that function for the log-probabilities of sampled tokens, of tokens after drafts,
and of prompts: a top-k, a log-softmax of the chosen tokens, and the ranks of the sampled ones, each a pass
over the vocabulary or two. `topk_logprobs` reads each row once, and is the same in every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.constants import MAX_RANKED_TOKENS
from gvr_topk.integrations._kit.replacement import Replacement, readable
from gvr_topk.integrations._kit.verify import Differs
from gvr_topk.integrations.vllm.upstream import OUTPUTS_MODULE
from gvr_topk.sampling import TopkLogprobs, topk_logprobs

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


class LogprobsHook(Replacement[ScoresCall]):
    """Computes log-probabilities of one vLLM process with our op."""

    arguments = ScoresCall
    reason = "logprobs"
    kind = "log-probability"

    def reason_against(self, call: ScoresCall) -> str:
        if call.logits_mode:
            return "are logits"
        if call.max_per_req_token_ids:
            return "of given tokens"
        if call.num_logprobs > MAX_RANKED_TOKENS:
            return "of too many tokens"
        return "" if readable(call.logits) else "layout"

    def run(self, call: ScoresCall, original: Callable[[], Any]) -> Any:
        ours = topk_logprobs(call.logits, call.num_logprobs, call.sampled_token_ids)
        if self.verifier is not None and self.verifier.compares(self.reason, call.logits.device):
            self.verifier.compare(self.reason, original, lambda theirs: _agree(call.logits, ours, theirs))
        ours.ids[:, 0] = call.sampled_token_ids  # vLLM names one behind the vocabulary, too
        starts = call.cu_num_logits
        on_device = isinstance(starts, Tensor)
        return sys.modules[OUTPUTS_MODULE].LogprobsTensors(
            logprob_token_ids=ours.ids,
            logprobs=ours.logprobs,
            selected_token_ranks=ours.ranks,
            cu_num_generated_tokens=None if on_device else starts,
            cu_num_generated_tokens_tensor=starts if on_device else None,
        )

    def announcement(self, call: ScoresCall) -> str:
        return f"log-probabilities of {call.num_logprobs} and the sampled token"


def _agree(logits: Tensor, ours: TopkLogprobs, theirs: Any) -> bool:
    """Return whether a row was compared; raise `Differs` if one has another result.

    Rows with NaN, or of a token behind the vocabulary, are not compared: vLLM has no log-probabilities there.
    Of equal logits either may be named. Nor is the rank of a token at -inf: vLLM counts places behind the
    row, too, up to a multiple of 8,192.
    """
    judged = ~theirs.logprobs.isnan().any(1) & (ours.ids >= 0).all(1)
    last = logits.shape[1] - 1
    named = (ours.ids, theirs.logprob_token_ids.long())
    values, other = (logits.gather(1, ids.clamp(0, last)) for ids in named)
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
