"""`gvr_topk.sampling.verify` in place of ``RejectionSampler._verify`` of vLLM's V2 model runner.

vLLM accepts a draft with the probability that the model gives it, and otherwise draws another token. `verify`
draws the token of every row as `sample` does, and accepts the drafts that equal the tokens drawn. The law is
the same, and the tokens are those that the request gets without drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gvr_topk.integrations._kit.replacement import Replacement
from gvr_topk.integrations._kit.verify import Differs
from gvr_topk.integrations.vllm.sampler import (
    SampleCall,
    outputs_if_read,
    parameters,
    processed_logits,
    reason_against,
)
from gvr_topk.integrations.vllm.upstream import VERIFY_DRAFTS
from gvr_topk.sampling import Verified, verify


class VerifyCall(NamedTuple):
    """Arguments of ``RejectionSampler._verify``, in its order."""

    rejection_sampler: Any
    logits: Tensor
    draft_logits: Tensor | None
    draft_sampled: Tensor
    pos: Tensor
    cu_num_logits: Tensor
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray[Any, Any]
    expanded_idx_mapping: Tensor
    expanded_local_pos: Tensor
    seq_lens_upper_bound_np: np.ndarray[Any, Any]
    verify_draft_sampled: Tensor
    """`draft_sampled`, but -1 where the grammar has not checked the draft; it decides what is accepted."""

    @property
    def draws(self) -> SampleCall:
        """The rows as a call of the sampler; one request of a step may have all of its calls scored."""
        shared = {name: given for name, given in self._asdict().items() if name in SampleCall._fields}
        sampler = self.rejection_sampler.sampler
        scored = bool(np.count_nonzero(sampler.sampling_states.num_logprobs >= 0))
        return SampleCall(sampler, input_ids=self.draft_sampled, return_logprobs=scored, **shared)


class DraftsHook(Replacement[VerifyCall]):
    """Verifies the drafts of one vLLM process with our op."""

    arguments = VerifyCall
    reason = kind = "drafts"
    own = "rejection sampler"

    def reason_against(self, call: VerifyCall) -> str:
        sampler = call.rejection_sampler.sampler
        reason = _reason_against_drafts(call) or reason_against(sampler, call.logits, call.idx_mapping_np)
        if reason:
            self.say("info", f"{self.kind}: {VERIFY_DRAFTS.name} of vLLM serves calls {reason}")
        return reason

    def run(self, call: VerifyCall, original: Callable[[], Any]) -> tuple[Tensor, Tensor, Tensor]:
        draws = call.draws
        outputs = outputs_if_read(draws)
        ours = verify(
            call.logits,
            call.verify_draft_sampled,
            call.rejection_sampler.num_speculative_steps,
            starts=call.cu_num_logits,
            **parameters(draws, call.expanded_idx_mapping, call.pos, **outputs),
        )
        temperature = draws.sampler.sampling_states.temperature.np
        if (
            self.verifier is not None
            and self.verifier.compares(self.reason, call.logits.device)
            and (temperature[call.idx_mapping_np] == 0).any()
        ):
            self.verifier.compare(self.reason, original, lambda theirs: _agree(call, ours, *theirs[1:]))
        return processed_logits(draws, outputs), ours.tokens, ours.lengths

    def announcement(self, call: VerifyCall) -> str:
        return "drafts of the V2 model runner: accepted where they equal the tokens drawn"


def _reason_against_drafts(call: VerifyCall) -> str:
    """Return why vLLM has to verify drafts of this kind."""
    sampler = call.rejection_sampler
    if type(sampler) is not sys.modules[VERIFY_DRAFTS.module].RejectionSampler:
        return "of another rejection sampler"
    if call.draft_logits is not None:
        return "with probabilities of drafts"
    if (
        sampler.use_block_verification
        or sampler.fly_window_size
        or sampler.synthetic_conditional_rates is not None
    ):
        return "with another rejection_sample_method"
    return ""


def _agree(call: VerifyCall, ours: Verified, sampled: Tensor, num_sampled: Tensor) -> bool:
    """Return whether a greedy request was compared; raise `Differs` if one has other tokens.

    vLLM's noise is another one here, so other requests have other tokens. Nor are those compared that have
    NaN, +inf or nothing else than -inf in a row.
    """
    slots, starts = call.idx_mapping, call.cu_num_logits.long()
    temperature = call.rejection_sampler.sampler.sampling_states.temperature.gpu[slots.clamp(min=0)]
    odd = pad((~call.logits.amax(1).isfinite()).cumsum(0), (1, 0))
    judged = (slots >= 0) & (temperature == 0) & (odd[starts[1:]] == odd[starts[:-1]])
    behind = torch.arange(sampled.shape[1], device=sampled.device) >= num_sampled[:, None]
    theirs = sampled.masked_fill(behind, -1)  # vLLM leaves these as they were allocated
    wrong = (ours.tokens != theirs).any(1) | (ours.lengths != num_sampled)
    for at in (judged & wrong).nonzero().flatten()[:1].tolist():
        raise Differs(
            f"request {at} of {len(slots)}: {ours.lengths[at]} of {ours.tokens[at].tolist()},"
            f" and {num_sampled[at]} of {theirs[at].tolist()} by vLLM"
        )
    return bool(judged.any())
