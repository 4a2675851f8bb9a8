"""`gvr_topk.sampling` in place of TensorRT-LLM's fused sampler, which its one-model drafting draws with.

`tensorrt_llm._torch.pyexecutor.sampler.ops.fused` has three functions: one draws tokens, one also returns the
probabilities that it drew from, and one returns those of the target model for rejection sampling. They run
inside the CUDA graph, so everything here stays on the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.replacement import Replacement, empty_limits, readable
from gvr_topk.integrations._kit.verify import Differs
from gvr_topk.integrations.tensorrt_llm.upstream import SPECULATION
from gvr_topk.sampling import apply_limits_, renorm, sample

GREEDY_TEMPERATURE = 1e-4
"""Temperature up to which a row is greedy, as elsewhere in TensorRT-LLM; it marks greedy rows with 1e-5."""

ROW_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
OFFSET_STEP = 0xBF58476D1CE4E5B9 - (1 << 64)
"""Odd numbers without pattern, so that multiples of both keep apart seeds that lie close together."""

TOLERANCE = 1e-4
"""By how much a probability of TensorRT-LLM's may differ, as a share of the row's largest."""

EPSILON = 1e-6
"""What TensorRT-LLM adds to each temperature."""

MARGIN = 1e-3
"""By what share of itself top-p, and by how much a logit at the border of a filter, may be off."""


class FusedCall(NamedTuple):
    """Arguments of the three functions; that of probabilities alone has no seed and no offset."""

    logits: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor | None
    seed: Tensor | None = None
    offset: Tensor | None = None


class FusedTokens(Replacement[FusedCall]):
    """Draws tokens."""

    arguments = FusedCall
    reason = kind = own = "sampler"
    outputs: ClassVar[tuple[str, ...]] = ("tokens",)

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FusedCall:
        call = super().read(args, kwargs)
        rows = len(call.logits)
        return call._replace(  # parameters may be longer
            temperatures=call.temperatures[:rows],
            top_ks=call.top_ks[:rows],
            top_ps=call.top_ps[:rows],
            min_ps=None if call.min_ps is None else call.min_ps[:rows],
        )

    def reason_against(self, call: FusedCall) -> str:
        # A process may start several engines.
        if _mode(os.environ.get(environment.ENABLE_TRTLLM), os.environ.get(environment.YAML)) is Mode.OFF:
            self.say("info", f"off: sampler: neither {environment.ENABLE_TRTLLM}=1 nor the YAML key is set")
            return "not asked for"
        return "" if readable(call.logits) else "layout"

    def run(self, call: FusedCall, original: Callable[[], Any]) -> Any:
        limits = empty_limits(call.logits) if "probabilities" in self.outputs else None
        results = []
        tokens = _draw(call, limits=limits, **(_noise(call) if "tokens" in self.outputs else {}))
        if "tokens" in self.outputs:
            results.append(tokens)
        if limits is not None:
            results.append(renorm(call.logits, limits))
        if self.verifier is not None and self.verifier.compares(self.kind, call.logits.device):
            self.verifier.compare(self.kind, original, lambda theirs: _agree(call, results, theirs))
        return tuple(results) if len(results) > 1 else results[0]

    def announcement(self, call: FusedCall) -> str:
        return f"{' and '.join(self.outputs)} of the fused sampler"


class FusedTokensAndProbs(FusedTokens):
    """Draws tokens, and returns the probabilities that they are drawn from."""

    reason = kind = "sampler with probabilities"
    outputs = ("tokens", "probabilities")


class FusedProbs(FusedTokens):
    """Returns the probabilities that a token would be drawn from."""

    reason = kind = "sampler's probabilities"
    outputs = ("probabilities",)


@lru_cache
def _mode(asked: str | None, published: str | None) -> Mode:
    """What these values of the environment's variables ask for."""
    return environment.mode()


def _draw(call: FusedCall, **others: Any) -> Tensor:
    """Draw a token of each row; `others` are noise, limits, and parameters in place of the call's."""
    parameters = {
        "temperature": threshold(call.temperatures, GREEDY_TEMPERATURE, 0.0),
        "top_k": call.top_ks,
        "top_p": call.top_ps,
        "min_p": 0.0 if call.min_ps is None else call.min_ps,
        "seeds": 0,
        "positions": 0,
        **others,
    }
    out = torch.empty(len(call.logits), dtype=torch.int32, device=call.logits.device)
    return sample(call.logits, order="vllm", noise="cdf", out=out, **parameters)


def _noise(call: FusedCall) -> dict[str, Tensor]:
    """Return a seed and a position for each row.

    Rows may share a seed and an offset, as those of one request do, so the seed also counts the rows before
    that have the same two. That is the number of the row if all share them, and 0 if the row has them alone,
    so its noise then depends on no other row. Requests without a seed all get the same one, at offsets that
    others of them have had, so their rows go by their number, as all rows do in TensorRT-LLM. The upper half
    of the offset goes into the seed, because only the lower half of a position counts.
    """
    rows, device = len(call.logits), call.logits.device
    if call.seed is None or call.offset is None:
        seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), dtype=torch.int64, device=device)
        return {"seeds": seeds, "positions": torch.zeros_like(seeds)}
    seed, offset = (each.reshape(-1)[:rows].expand(rows) for each in (call.seed, call.offset))
    row = torch.arange(rows, device=device)
    before = torch.where(seed == _default_seed(), row, _earlier_alike(row, seed, offset))
    seeds = seed + ROW_STEP * before + OFFSET_STEP * (offset >> 32)
    return {"seeds": seeds, "positions": offset.contiguous()}


def _default_seed() -> int:
    """The seed that TensorRT-LLM gives to requests without one, as the callers of its functions know it."""
    return int(getattr(sys.modules.get(SPECULATION), "DEFAULT_SAMPLING_SEED", 42))


def _earlier_alike(row: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Count the rows before each that have its seed and offset."""
    if len(row) == 0:
        return row
    order = offset.argsort(stable=True)
    order = order[seed[order].argsort(stable=True)]
    begins = pad(seed[order].diff().ne(0) | offset[order].diff().ne(0), (1, 0), value=True)
    first = torch.where(begins, row, 0).cummax(0).values
    return torch.empty_like(row).scatter_(0, order, row - first)


def _agree(call: FusedCall, ours: list[Tensor], theirs: Any) -> bool:
    """Return whether a row was compared; raise `Differs` if one has another result.

    TensorRT-LLM's noise is another one, so a token only has to be one that is kept. TensorRT-LLM keeps all
    logits that tie with the k-th one, and sums for top-p in fp32, so either may keep tokens at the border
    that the other does not. That scales all probabilities of the row, which are compared as shares of the
    largest. Rows with NaN, or whose largest logit is infinite, are not compared.
    """
    logits = call.logits.float()
    judged = logits.amax(1, keepdim=True).isfinite()
    ties = (logits >= _last_kept(call, logits, top_p=1.0)).sum(1, dtype=torch.int32)
    off = torch.where(call.top_ps < 1, MARGIN, 0.0)
    lowest = _last_kept(call, logits, top_k=ties, top_p=call.top_ps * (1 + off)) - MARGIN
    border = (logits >= lowest) & (logits <= _last_kept(call, logits, top_p=call.top_ps * (1 - off)) + MARGIN)
    allowed = TOLERANCE + EPSILON / call.temperatures[:, None].clamp(min=GREEDY_TEMPERATURE)
    for mine, other in zip(ours, theirs if isinstance(theirs, tuple) else (theirs,), strict=True):
        if mine.dim() == 1:
            what = "a token is not kept"
            wrong = logits.gather(1, torch.stack((mine, other), 1).long()) < lowest
        else:
            what = "a probability differs"
            shares = (each / each.amax(1, keepdim=True) for each in (mine, other))
            wrong = (torch.sub(*shares).abs() > allowed) & ~border
        rows = (wrong & judged).any(1).nonzero()
        if len(rows):
            raise Differs(f"row {int(rows[0])} of {len(logits)}: {what}")
    return bool(judged.any())


def _last_kept(call: FusedCall, logits: Tensor, **others: Any) -> Tensor:
    """Return the lowest logit that each row keeps."""
    limits = empty_limits(call.logits)
    _draw(call, limits=limits, **others)
    kept = apply_limits_(logits.clone(), limits)
    return kept.masked_fill(kept == -torch.inf, torch.inf).amin(1, keepdim=True)
