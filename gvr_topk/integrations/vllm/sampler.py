"""`gvr_topk.sampling.sample` in place of ``Sampler.sample`` of vLLM's V2 model runner.

vLLM copies the logits to fp32, scales, filters and draws in a kernel each. `sample` takes the logits as the
head wrote them and the requests' parameters where vLLM keeps them, and draws with vLLM's own noise. So tokens
are those of vLLM's native sampler, but for near ties of the noise and tokens at the border of top-p or min-p.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gvr_topk.integrations._kit.replacement import Replacement, empty_limits, readable
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations._kit.verify import Differs
from gvr_topk.integrations.vllm.upstream import MASKS, SAMPLE
from gvr_topk.sampling import apply_limits_, arithmetic, sample

DEVICE = "cuda"
"""Type of the devices whose logits are sampled: on a CPU, vLLM's sampler is the faster one."""

MIRRORS = {
    "LogitBiasState": "use_logit_bias",
    "PenaltiesState": "use_penalty",
    "BadWordsState": "num_bad_words",
    "ThinkingBudgetState": "use_thinking_budget",
}
"""Classes that change logits ahead of the temperature, and where the host knows for which requests."""

MARGIN = 1e-3
"""By what share of itself the effective top-p or min-p of vLLM may be off: it sums in fp32."""

HALVINGS, LEAST_RANGE = 2.0**-17, 2e-9
"""How far off vLLM's cut for top-p may be, as a share of the largest probability and as a probability: it
halves a range of probabilities 18 times, or until 1e-9 are left. Both are twice that."""

SPLIT_ROWS = 64
"""Most rows of a call for which vLLM has another kernel of top-p alone."""

DRAWN = "gvr_topk_drawn"
"""Attribute of logits that vLLM gets in place of filtered ones: `kept`, `counts`, and what filters them."""

NEAR = 1e-5
"""By how much, and by what share of itself, one of two scores that tie may be larger."""


class SampleCall(NamedTuple):
    """Arguments of ``Sampler.sample``, in its order."""

    sampler: Any
    logits: Tensor
    expanded_idx_mapping: Tensor
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray[Any, Any]
    pos: Tensor
    input_ids: Tensor
    expanded_local_pos: Tensor
    seq_lens_upper_bound_np: np.ndarray[Any, Any]
    return_logprobs: bool = False


class SamplerHook(Replacement[SampleCall]):
    """Draws the tokens of one vLLM process with our op."""

    arguments = SampleCall
    reason = kind = own = "sampler"

    def reason_against(self, call: SampleCall) -> str:
        reason = reason_against(call.sampler, call.logits, call.idx_mapping_np)
        if reason:
            self.say("info", f"{self.kind}: {SAMPLE.name} of vLLM draws calls {reason}")
        return reason

    def run(self, call: SampleCall, original: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        outputs = outputs_if_read(call)
        tokens = _draw(call, call.logits, call.expanded_idx_mapping, call.pos, **outputs)
        if self.verifier is not None and self.verifier.compares(self.reason, call.logits.device):
            with native_noise(call.sampler):
                self.verifier.compare(self.reason, original, lambda theirs: _agree(call, tokens, theirs[0]))
        return tokens, processed_logits(call, outputs)

    def announcement(self, call: SampleCall) -> str:
        return "tokens of the V2 model runner: temperature, min-p, top-k, top-p and draw"


def reason_against(sampler: Any, logits: Tensor, requests: np.ndarray[Any, Any]) -> str:
    """Return why vLLM has to draw for requests; what it asks stands on the host."""
    if type(sampler) is not sys.modules[SAMPLE.module].Sampler:
        return "of another sampler, such as a watermark's"
    if sampler.use_fp64_gumbel:
        return "with fp64 noise"
    if np.count_nonzero(sampler.needs_logits_processing[requests]):  # in less time than `any`
        states = (*sampler.logits_processors, sampler.thinking_budget_state)
        if any(_changes_logits(state, requests) for state in states):
            return "with penalties or other processors of logits"
    if logits.device.type != DEVICE:
        return "on another device"
    return "" if readable(logits) else "of another layout"


def _changes_logits(state: Any, requests: np.ndarray[Any, Any]) -> bool:
    """Whether a processor changes logits of some request; one that is not known may."""
    name = MIRRORS.get(type(state).__name__)
    if name is None:
        return True
    if name == "use_thinking_budget" and not state.enabled:
        return False
    mirror = getattr(state, name)
    return bool(np.count_nonzero(getattr(mirror, "np", mirror)[requests]))


def parameters(call: SampleCall, slots: Tensor, positions: Tensor, **others: Any) -> dict[str, Any]:
    """Arguments of our draw; `others` are outputs, and parameters in place of the requests'."""
    states = call.sampler.sampling_states
    return {
        **{name: getattr(states, name).gpu for name in ("temperature", "top_k", "top_p", "min_p", "seeds")},
        "slots": slots,
        "positions": positions,
        "order": "vllm",
        "noise": "murmur",
        **others,
    }


def _draw(call: SampleCall, logits: Tensor, slots: Tensor, positions: Tensor, **others: Any) -> Tensor:
    """Draw a token of each row, with `parameters`."""
    return sample(logits, **parameters(call, slots, positions, **others))


def outputs_if_read(call: SampleCall) -> dict[str, Tensor]:
    """Allocate limits if vLLM makes masks or log-probabilities of scaled or filtered logits.

    Where these are masks of few tokens alone, also allocate `kept` and `counts`. vLLM's mask of a greedy row
    has more than its token.
    """
    sampler, requests = call.sampler, call.idx_mapping_np
    modes = sys.modules[SAMPLE.module].PROCESSED_LOGPROBS_MODES
    scored = call.return_logprobs and sampler.logprobs_mode in modes
    read = sampler.return_sampling_mask or scored
    if not (read and np.count_nonzero(sampler.needs_logits_processing[requests])):
        return {}
    limits = empty_limits(call.logits)
    width = int(sampler.sampling_states.top_k.np[requests].max())
    greedy = not sampler.sampling_states.temperature.np[requests].all()
    masks = sys.modules[MASKS.module]
    hooked = masks.SamplingMaskTensors.from_logits is MasksHook.replaced
    if scored or greedy or not hooked or width > masks.MAX_COMPACT_SUPPORT:
        return {"limits": limits}
    kept = limits.new_empty((len(limits), width))
    return {"limits": limits, "kept": kept, "counts": limits.new_empty(len(limits))}


def processed_logits(call: SampleCall, outputs: Mapping[str, Tensor]) -> Tensor:
    """Return what is kept of the logits over the temperature, else -inf, in fp32; greedy rows as they are.

    Without outputs, return the logits of the call; with `kept` a view of them, from which `MasksHook` has it.
    """
    if not outputs:
        return call.logits
    limits = outputs["limits"]
    if "kept" in outputs:
        filtered = functools.partial(processed_logits, call, {"limits": limits})
        logits = call.logits.detach()
        setattr(logits, DRAWN, (outputs["kept"], outputs["counts"], filtered))
        return logits
    temperature = call.sampler.sampling_states.temperature.gpu[call.expanded_idx_mapping, None]
    limits.masked_fill_(temperature == 0, 0)  # which keeps everything
    logits = apply_limits_(call.logits.to(torch.float32, copy=True), limits)
    return logits.div_(torch.where(temperature == 0, 1, temperature))


class MaskCall(NamedTuple):
    """Arguments of ``SamplingMaskTensors.from_logits``, in its order."""

    logits: Tensor
    cu_num_logits: Tensor
    num_sampled_tokens: Tensor
    max_num_kept: int
    rows_per_request: int = 1


class MasksHook(Replacement[MaskCall]):
    """Makes masks of what a draw kept, where it is beside the logits; vLLM makes them of filtered logits."""

    arguments = MaskCall
    reason = "masks"
    kind = own = "mask"
    replaced: ClassVar[Any] = None

    def wrap(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def of_filtered(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            *_, filtered = getattr(logits, DRAWN, (lambda: logits,))
            return original(filtered(), *args, **kwargs)

        MasksHook.replaced = super().wrap(of_filtered)
        return staticmethod(MasksHook.replaced)

    def reason_against(self, call: MaskCall) -> str:
        kept, *_ = getattr(call.logits, DRAWN, (None,))
        return "of filtered logits" if kept is None or kept.shape[1] != call.max_num_kept else ""

    def run(self, call: MaskCall, original: Callable[[], Any]) -> Any:
        kept, counts, _ = getattr(call.logits, DRAWN)
        width = call.logits.shape[1]
        slots = torch.arange(call.rows_per_request, device=kept.device)
        rows = (call.cu_num_logits[:-1, None] + slots).clamp(max=len(kept) - 1)
        counts = counts[rows].masked_fill(slots >= call.num_sampled_tokens[:, None], 0).flatten()
        # vLLM reads the bits of rows with more tokens than columns, of which there is none.
        bits = counts.new_empty((len(counts), (width + 7) // 8), dtype=torch.uint8)
        masks = sys.modules[MASKS.module].SamplingMaskTensors
        return masks(kept[rows].flatten(0, 1), bits, counts, width, call.rows_per_request)

    def announcement(self, call: MaskCall) -> str:
        return "masks of kept tokens, from the call that draws"


@contextmanager
def native_noise(sampler: Any) -> Iterator[None]:
    """Keep vLLM from kernels that draw with another noise, and have no token to compare."""
    with Transaction() as changes:
        changes.set_attribute(sampler, "use_flashinfer", False)
        changes.set_attribute(sampler, "use_xpu_sampler", False)
        yield


def _agree(call: SampleCall, ours: Tensor, theirs: Tensor) -> bool:
    """Return whether a row was compared; raise `Differs` if one has a token that no near tie explains.

    Rows with NaN, with +inf or with nothing else than -inf are not compared, nor are those of no request.
    """
    count, width = call.logits.shape
    judged = call.logits.amax(1).isfinite() & call.expanded_idx_mapping.ge(0)
    rows = (judged & (ours != theirs)).nonzero().flatten()
    pairs = torch.stack((ours, theirs), 1)[rows]
    for at, why in zip(rows.tolist(), _faults(call, rows, pairs, width), strict=True):
        if why:
            raise Differs(f"row {at} of {count}: token {int(ours[at])}, and {int(theirs[at])} by vLLM: {why}")
    return bool(judged.any())


def _faults(call: SampleCall, rows: Tensor, pairs: Tensor, width: int) -> list[str]:
    """Say of rows with two tokens what is wrong with them; empty for a near tie."""
    if len(rows) == 0:
        return []
    tokens = pairs.clamp(0, width - 1)
    at_cut = _at_cut(call, rows, tokens)
    within = (_keeps(call, rows, tokens, MARGIN) | at_cut) & (tokens == pairs)
    kept = within.all(1) | (within[:, 0] & (_without_top_p(call, rows) == pairs[:, 1]))
    scores = _scores(call, rows, tokens)
    # Whether the better token is at the border of a filter, and may not have been kept.
    border = at_cut | ~_keeps(call, rows, tokens, -MARGIN)
    tied = torch.isclose(scores[:, 0], scores[:, 1], rtol=NEAR, atol=NEAR)
    tied |= border.gather(1, scores.argmax(1, keepdim=True))[:, 0]
    return [
        "not kept" if not there else "" if near else f"scores {score}"
        for there, near, score in zip(kept.tolist(), tied.tolist(), scores.tolist(), strict=True)
    ]


def _keeps(call: SampleCall, rows: Tensor, tokens: Tensor, margin: float) -> Tensor:
    """Whether rows keep some tokens if their filters keep more by a margin, or less by a negative one."""
    states = call.sampler.sampling_states
    top_p, min_p = states.top_p.gpu, states.min_p.gpu
    wider = torch.where(top_p < 1, top_p * (1 + margin), top_p)
    kept = _kept(call, rows, top_p=wider, min_p=min_p * (1 - margin))
    return kept.gather(1, tokens) > -torch.inf


def _kept(call: SampleCall, rows: Tensor, **others: Any) -> Tensor:
    """Return the logits that some rows keep, else -inf; `others` are parameters in place of the requests'."""
    logits = call.logits[rows]
    limits = empty_limits(logits)
    _draw(call, logits, call.expanded_idx_mapping[rows], call.pos[rows], limits=limits, **others)
    return apply_limits_(logits, limits)


def _at_cut(call: SampleCall, rows: Tensor, tokens: Tensor) -> Tensor:
    """Whether tokens are, to vLLM's search, as probable as the last one that top-p keeps; equal ones are."""
    states, slots = call.sampler.sampling_states, call.expanded_idx_mapping[rows]
    temperature, top_p = states.temperature.gpu[slots, None], states.top_p.gpu[slots, None]
    logits = call.logits[rows].float()
    # Shares of the largest probability.
    shares = torch.exp((logits - logits.amax(1, keepdim=True)) / temperature.clamp(min=1e-5))
    last = shares.masked_fill(_kept(call, rows) == -torch.inf, 1).amin(1, keepdim=True)
    off = (LEAST_RANGE * shares.sum(1, keepdim=True)).clamp(min=HALVINGS)
    return ((shares.gather(1, tokens) - last).abs() <= off) & (top_p < 1) & (temperature > 0)


def _without_top_p(call: SampleCall, rows: Tensor) -> Tensor:
    """Return what is drawn without top-p, where vLLM may leave it out, and else -1.

    Its kernel of top-p alone, for more than `SPLIT_ROWS` rows or for no more tokens than top-k, keeps all
    tokens of a row in which its exponentials underflow.
    """
    states, slots, logits = call.sampler.sampling_states, call.expanded_idx_mapping[rows], call.logits[rows]
    top_k = states.top_k.gpu[slots]
    many = (top_k >= logits.shape[1]) & (len(call.logits) > SPLIT_ROWS)
    few = (top_k < logits.shape[1]) & ((logits > -torch.inf).sum(1) <= top_k)
    return torch.where(many | few, _draw(call, logits, slots, call.pos[rows], top_p=1.0), -1)


def _scores(call: SampleCall, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return the scores that tokens of some rows have with vLLM's noise."""
    states, slots = call.sampler.sampling_states, call.expanded_idx_mapping[rows].cpu().numpy()
    temperature = states.temperature.np[slots, None].astype(np.float64)
    logits = call.logits[rows].gather(1, tokens).double().cpu().numpy()
    seeds, positions = states.seeds.np[slots, None], call.pos[rows, None].cpu().numpy()
    noise = arithmetic.gumbel(arithmetic.hash32(seeds, positions, tokens.cpu().numpy()))
    # Of a greedy row, the filters keep one token alone, and its score is not looked at.
    return torch.from_numpy(logits / np.maximum(temperature, 1e-5) + noise).to(tokens.device)
