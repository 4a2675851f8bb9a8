"""`gvr_topk.sampling.sample` in SGLang: a sampler that draws from logits, and the law of drafts to verify.

SGLang divides the logits by the temperature, makes probabilities of them in place, and filters and draws in
kernels of their own. `sample` does all that in one call, and does not write the logits.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.replacement import empty_limits
from gvr_topk.integrations.sglang.hook import NotServedError, Served, around
from gvr_topk.integrations.sglang.points import SAMPLER_MODULE, TREES
from gvr_topk.integrations.sglang.transforms import check_scores
from gvr_topk.sampling import renorm, sample

BACKEND = "gvr_topk"
"""Value of ``--sampling-backend``."""

INNER_BACKEND = "pytorch"
"""Backend of SGLang that draws what is left to SGLang under `BACKEND`: the one that takes seeds, too."""

DEVICE = "cuda"
"""Type of the devices whose logits are sampled: on a CPU, SGLang's sampler is the faster one."""


class Samplers:
    """Makes the samplers of one process; an error in one of them switches all of them off."""

    def __init__(self, say: Say) -> None:
        hook = around("sampler", _draw, say, own="sampler")
        self._draw = functools.partial(hook, lambda *args, **kwargs: None)  # no tokens where SGLang draws

    def make(self) -> Any:
        """Make a sampler: SGLang's own class, with tokens that are drawn from the logits.

        The class is made here and not at import, because SGLang's is its base.
        """
        sglang, draw = importlib.import_module(SAMPLER_MODULE), self._draw

        class Sampler(sglang.Sampler):  # type: ignore[name-defined]
            _tokens: Tensor | None = None

            def forward(
                self, logits_output: Any, sampling_info: Any, return_logprob: bool, *args: Any, **kwargs: Any
            ) -> Tensor:
                tokens = draw(self, logits_output, sampling_info, return_logprob, *args, **kwargs)
                if tokens is not None and not return_logprob:
                    self._sync_token_ids_across_tp(tokens, sampling_info)
                    return tokens
                # SGLang fills in the log-probabilities, which need its softmax; only its draw is left out.
                self._tokens = tokens
                return super().forward(logits_output, sampling_info, return_logprob, *args, **kwargs)

            def _sample_from_probs(self, *args: Any, **kwargs: Any) -> Any:
                if self._tokens is not None:
                    return self._tokens, None
                kernel = sglang.get_exec().kernel
                ours = kernel.sampling_backend == BACKEND
                with kernel.override(sampling_backend=INNER_BACKEND) if ours else nullcontext():
                    return super()._sample_from_probs(*args, **kwargs)

        return Sampler()

    def around_create(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """AROUND hook of ``create_sampler``: replaces SGLang's own sampler, and no other one."""
        sampler = original(*args, **kwargs)
        return self.make() if type(sampler) is importlib.import_module(SAMPLER_MODULE).Sampler else sampler


def _draw(
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: Any,
    token_ids_logprobs: Any,
    positions: Tensor,
    *,
    logprob_logits: Tensor | None = None,
) -> Served:
    """Draw the tokens of a call of ``Sampler.forward``."""
    logits = logits_output.next_token_logits
    _check(logits)
    for what, asked in (
        ("a watermark", sampling_info.has_watermark_candidates or logprob_logits is not None),
        ("custom logit processors", sampling_info.has_custom_logit_processor),
        ("sampling masks", sampling_info.sampling_mask_batch_indices is not None),
        ("the policy of a trainer", sampler.rl_on_policy_target is not None),
        ("log-probabilities of greedy requests alone", return_logprob and sampling_info.is_all_greedy),
    ):
        if asked:
            raise NotServedError(what)
    sampler._preprocess_logits(logits, sampling_info)  # looks for NaN, if SGLang is asked to
    seeds: Any = sampling_info.sampling_seed
    at: Any = positions.to(torch.int64)
    if seeds is None:
        # As in SGLang's own draws, the generator of the device decides, which stands alike on all ranks.
        seeds, at = torch.randint(2**63 - 1, logits.shape[:1], device=logits.device), 0
    tokens = sample(
        logits,
        temperature=sampling_info.temperatures.view(-1),
        top_k=sampling_info.top_ks,
        top_p=sampling_info.top_ps,
        min_p=sampling_info.min_ps,
        seeds=seeds,
        positions=at,
        # Without top-p all orders are one, and this one is the fastest.
        order="joint" if sampling_info.need_top_p_sampling else "vllm",
        noise="murmur",
    )
    return Served(tokens, ())


def target_probs(
    *, next_token_logits: Tensor, sampling_info: Any, draft_token_num: int, bs: int, **hints: Any
) -> Served:
    """``build_speculative_verify_target_probs``: what temperature, top-k and then top-p leave, normalized."""
    probs = _filtered(next_token_logits, sampling_info, draft_token_num)
    return Served(probs.view(bs, draft_token_num, -1), ())


def _filtered(logits: Tensor, info: Any, rows_each: int) -> Tensor:
    """Return the probabilities that requests leave of their rows."""
    _check(logits)
    if len(logits) != rows_each * info.temperatures.numel():
        raise NotServedError("other rows than those of drafts")
    limits = empty_limits(logits)
    sample(
        logits,
        temperature=info.temperatures.view(-1),
        top_k=info.top_ks,
        top_p=info.top_ps,
        slots=torch.arange(len(logits), device=logits.device) // rows_each,
        seeds=0,
        positions=0,
        order="hf",
        limits=limits,
    )
    return renorm(logits, limits)


class TreeProbs:
    """Makes the law that ``eagle_sample`` verifies a tree of drafts against, in one call from the logits.

    Its body calls a softmax, and then a filter each for top-k and top-p, by names of its module that nothing
    else calls. So they are replaced there: the first filters, too, and the others leave that as it is.
    """

    def __init__(self, say: Say) -> None:
        self._call: ContextVar[Any] = ContextVar("call", default=None)
        self._filter = around(TREES.name, self._serve, say)

    def install(self, module: Any) -> None:
        """Replace the three names, that of the softmax last: without it the others change nothing."""
        wraps = {"top_k_renorm_prob": self._renorm, "top_p_renorm_prob": self._renorm}
        for name, wrap in (wraps | {"sampling_softmax": self._softmax}).items():
            setattr(module, name, functools.partial(wrap, getattr(module, name)))

    def around_sample(self, original: Any, verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """AROUND hook of ``eagle_sample``: notes whose drafts are verified."""
        call = self._call.set(SimpleNamespace(input=verify_input, batch=batch, probs=None))
        try:
            return original(verify_input, batch, *args, **kwargs)
        finally:
            self._call.reset(call)

    def _softmax(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._filter(original, *args, **kwargs) if self._call.get() else original(*args, **kwargs)

    def _serve(self, logits: Tensor, temperatures: Tensor) -> Served:
        call = self._call.get()
        call.probs = _filtered(logits, call.batch.sampling_info, call.input.draft_token_num)
        return Served(call.probs, ())

    def _renorm(self, original: Callable[..., Any], probs: Tensor, *args: Any, **kwargs: Any) -> Any:
        ours = (call := self._call.get()) and probs is call.probs
        return probs if ours else original(probs, *args, **kwargs)


def _check(logits: Tensor) -> None:
    """Refuse logits that the ops do not take."""
    if logits.device.type != DEVICE:
        raise NotServedError(f"logits on {logits.device.type}")
    check_scores(logits)
