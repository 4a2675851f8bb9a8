"""The arguments of the sampler's functions, and their checks."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gvr_topk.arguments import Checks, Output
from gvr_topk.constants import FLAG_PDL, MAX_ROWS
from gvr_topk.sampling.arithmetic import MAX_VOCABULARY

LIMIT_WORDS = 8
"""32-bit words of one row of limits."""


class Order(enum.IntEnum):
    """In which order filters apply; `docs/sampling.md` says which engine has which."""

    VLLM = 0
    HF = 1
    JOINT = 2
    TEMPERATURE_LAST = 3


class Noise(enum.IntEnum):
    """How a token is drawn."""

    CDF = 0
    MURMUR = 1


class LogprobMode(enum.IntEnum):
    """The distribution of the log-probability of the drawn token."""

    RAW = 0
    PROCESSED = 1


CHOICES: dict[type[enum.IntEnum], dict[str, int]] = {
    kind: {one.name.lower(): int(one) for one in kind} for kind in (Order, Noise, LogprobMode)
}
"""Numbers of all choices by their names; looking through an enumeration takes the host longer."""


class Flag(enum.IntFlag):
    """What a row's flags say."""

    NAN = 1
    """An allowed logit is NaN."""
    NO_CANDIDATE = 2
    """No allowed logit is above -inf."""
    KEPT_OVERFLOW = 4
    """More tokens are kept than `kept` has columns."""


class SampleArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.sample``, in the order of its schema.

    `gvr_topk.sampling.sample` explains them. Each parameter is a tensor, or a number in the field with
    ``_value``, which counts if the tensor is None. `options` is `FLAG_PDL` or 0.
    """

    logits: Tensor
    out: Output
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None
    slots: Tensor | None = None
    allow: Tensor | None = None
    allow_row: Tensor | None = None
    logprobs: Output | None = None
    ranks: Output | None = None
    kept: Output | None = None
    counts: Output | None = None
    kept_logprobs: Output | None = None
    limits: Output | None = None
    flags: Output | None = None
    temperature_value: float = 1.0
    top_k_value: int = 0
    top_p_value: float = 1.0
    min_p_value: float = 0.0
    seeds_value: int = 0
    positions_value: int = 0
    order: int = Order.VLLM
    noise: int = Noise.CDF
    logprob_mode: int = LogprobMode.RAW
    options: int = 0


class TopkLogprobsArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.topk_logprobs``, in the order of its schema."""

    logits: Tensor
    n: int
    sampled: Tensor
    ids: Output
    logprobs: Output
    ranks: Output


class VerifyArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.verify``, in the order of its schema.

    This is what `gvr_topk.sampling.verify` does behind the draw of the tokens `drawn`.
    """

    drawn: Tensor
    draft_tokens: Tensor
    starts: Tensor | None
    tokens: Output
    lengths: Output


class Fed(NamedTuple):
    """What `verify` reads behind a draw, and what the draw writes."""

    draft_tokens: Tensor
    starts: Tensor | None
    out: Output
    logprobs: Output | None = None
    ranks: Output | None = None
    kept: Output | None = None
    counts: Output | None = None
    kept_logprobs: Output | None = None
    limits: Output | None = None
    flags: Output | None = None


class ApplyLimitsArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.apply_limits_``, in the order of its schema."""

    logits: Output
    limits: Tensor
    allow: Tensor | None = None
    allow_row: Tensor | None = None


class RenormArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.renorm``, in the order of its schema."""

    logits: Tensor
    limits: Tensor
    out: Output
    allow: Tensor | None = None
    allow_row: Tensor | None = None


LimitsArguments = ApplyLimitsArguments | RenormArguments

SLOT_PARAMETERS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
}
"""Parameters that belong to a request, and their dtypes."""


class SamplingChecks(Checks):
    """The checks that the sampler's functions share."""

    def rows(self, logits: Tensor) -> None:
        """Check the logits."""
        self.score_rows(logits)
        if not 1 <= logits.shape[1] <= MAX_VOCABULARY:
            raise self.fail("logits", f"1 to {MAX_VOCABULARY} columns", logits.shape[1])

    def number(self, name: str, value: Any) -> float:
        """Convert a parameter to the nearest fp32 number, which the op does if the call is traced."""
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise self.fail(name, "a number or a tensor", repr(value))
        if torch.compiler.is_compiling():  # NumPy cannot be traced
            return float(value)
        with np.errstate(over="ignore"):
            return float(np.float32(value))

    def choice(self, name: str, value: Any, kind: type[enum.IntEnum]) -> int:
        """Look up a choice by its name."""
        choices = CHOICES[kind]
        if not isinstance(value, str) or value not in choices:
            raise self.fail(name, " or ".join(map(repr, choices)), repr(value))
        return choices[value]

    def ids(self, name: str, tensor: Any, like: Tensor, shape: tuple[int | None, ...]) -> None:
        """Check a tensor of tokens or slots, without gaps, of one of two dtypes."""
        if isinstance(tensor, Tensor) and tensor.dtype not in (torch.int64, torch.int32):
            raise self.fail(name, "dtype int64 or int32", str(tensor.dtype).removeprefix("torch."))
        self.tensor(name, tensor, like, getattr(tensor, "dtype", torch.int64), shape)

    def optional(self, name: str, tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> None:
        """Check an optional tensor with a number for each row."""
        if tensor is not None:
            self.tensor(name, tensor, like, dtype, (like.shape[0],))

    def mask(self, a: SampleArguments | LimitsArguments) -> None:
        """Check the packed mask of allowed tokens."""
        rows, width = a.logits.shape
        if a.allow is None:
            if a.allow_row is not None:
                raise self.fail("allow_row", "allow beside it", None)
            return
        masks = rows if a.allow_row is None else None
        self.tensor("allow", a.allow, a.logits, torch.int32, (masks, (width + 31) // 32))
        self.optional("allow_row", a.allow_row, a.logits, torch.int32)

    def limit_rows(self, limits: Tensor, like: Tensor) -> None:
        """Check limits of the rows."""
        self.tensor("limits", limits, like, torch.int32, (like.shape[0], LIMIT_WORDS))
        self.states("limits", limits)

    def limits(self, a: LimitsArguments) -> None:
        """Check what functions that apply limits have in common."""
        self.rows(a.logits)
        self.limit_rows(a.limits, a.logits)
        self.mask(a)


SAMPLE = SamplingChecks("gvr_topk.sample")
TOPK_LOGPROBS = SamplingChecks("gvr_topk.topk_logprobs")
APPLY_LIMITS = SamplingChecks("gvr_topk.apply_limits_")
RENORM = SamplingChecks("gvr_topk.renorm")
VERIFY = SamplingChecks("gvr_topk.verify")


def fields_of(**parameters: Any) -> dict[str, Any]:
    """Sort parameters of `sample` into fields for tensors and fields for numbers."""
    fields: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Tensor):
            fields[name] = value
        elif SLOT_PARAMETERS.get(name) == torch.float32:
            fields[f"{name}_value"] = SAMPLE.number(name, value)
        else:
            fields[f"{name}_value"] = SAMPLE.integer(name, value, -(1 << 63), (1 << 63) - 1)
    return fields


def check_sample(a: SampleArguments) -> None:
    """Refuse wrong arguments of a call of the sampler."""
    SAMPLE.rows(a.logits)
    rows = a.logits.shape[0]
    SAMPLE.ids("out", a.out, a.logits, (rows,))
    if a.slots is not None:
        SAMPLE.ids("slots", a.slots, a.logits, (rows,))
    SAMPLE.optional("positions", a.positions, a.logits, torch.int64)
    _check_parameters(a)
    SAMPLE.mask(a)
    _check_outputs(a)
    SAMPLE.memory(a)


def _check_outputs(a: SampleArguments) -> None:
    """Check the tensors for what is told of the tokens, and how they are drawn."""
    SAMPLE.optional("logprobs", a.logprobs, a.logits, torch.float32)
    SAMPLE.optional("ranks", a.ranks, a.logits, torch.int64)
    SAMPLE.optional("counts", a.counts, a.logits, torch.int32)
    rows = a.logits.shape[0]
    if a.kept is not None:
        SAMPLE.tensor("kept", a.kept, a.logits, torch.int32, (rows, None))
        SAMPLE.rows_apart("kept", a.kept, a.kept.shape[1])
    if a.kept_logprobs is not None:
        if a.kept is None:
            raise SAMPLE.fail("kept_logprobs", "kept beside it", None)
        columns = a.kept.shape[1]
        SAMPLE.tensor("kept_logprobs", a.kept_logprobs, a.logits, torch.float32, (rows, columns))
        SAMPLE.rows_apart("kept_logprobs", a.kept_logprobs, columns)
    if a.limits is not None:
        SAMPLE.limit_rows(a.limits, a.logits)
    SAMPLE.optional("flags", a.flags, a.logits, torch.int32)
    SAMPLE.integer("order", a.order, 0, len(Order) - 1)
    SAMPLE.integer("noise", a.noise, 0, len(Noise) - 1)
    SAMPLE.integer("logprob_mode", a.logprob_mode, 0, len(LogprobMode) - 1)
    SAMPLE.flag_bits(a.options, FLAG_PDL)


def _check_parameters(a: SampleArguments) -> None:
    """Check the parameters, which have a number for each row, or for each slot where there are slots."""
    count = None if a.slots is not None else a.logits.shape[0]
    for name, dtype in SLOT_PARAMETERS.items():
        tensor = getattr(a, name)
        if tensor is None:
            continue
        # An engine keeps parameters in pinned host memory, which a GPU reads in place.
        pinned = a.logits.is_cuda and tensor.is_cpu and tensor.is_pinned()
        SAMPLE.tensor(name, tensor, tensor if pinned else a.logits, dtype, (count,))
        count = tensor.shape[0]


def check_apply_limits(a: ApplyLimitsArguments) -> None:
    """Refuse wrong arguments of a call of `apply_limits_`."""
    APPLY_LIMITS.limits(a)
    APPLY_LIMITS.rows_apart("logits", a.logits, a.logits.shape[1])
    APPLY_LIMITS.memory(a)


def check_renorm(a: RenormArguments) -> None:
    """Refuse wrong arguments of a call of `renorm`."""
    RENORM.limits(a)
    width = a.logits.shape[1]
    RENORM.tensor("out", a.out, a.logits, torch.float32, (a.logits.shape[0], width))
    RENORM.rows_apart("out", a.out, width)
    # Probabilities may take the place of the logits they are made of, one by one.
    first, second = (
        (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.stride())
        for tensor in (a.logits, a.out)
    )
    RENORM.memory(a._replace(logits=a.limits) if first == second else a)


def check_topk_logprobs(a: TopkLogprobsArguments) -> None:
    """Refuse wrong arguments of a call of `topk_logprobs`."""
    TOPK_LOGPROBS.rows(a.logits)
    rows, width = a.logits.shape
    TOPK_LOGPROBS.integer("n", a.n, 0, width)
    TOPK_LOGPROBS.ids("sampled", a.sampled, a.logits, (rows,))
    TOPK_LOGPROBS.tensor("ids", a.ids, a.logits, torch.int64, (rows, a.n + 1))
    TOPK_LOGPROBS.tensor("logprobs", a.logprobs, a.logits, torch.float32, (rows, a.n + 1))
    TOPK_LOGPROBS.tensor("ranks", a.ranks, a.logits, torch.int64, (rows,))
    TOPK_LOGPROBS.rows_apart("ids", a.ids, a.n + 1)
    TOPK_LOGPROBS.rows_apart("logprobs", a.logprobs, a.n + 1)
    TOPK_LOGPROBS.memory(a)


def check_verify(a: VerifyArguments) -> None:
    """Refuse wrong arguments of a call of `verify` behind its draw."""
    VERIFY.ids("drawn", a.drawn, a.drawn, (None,))
    rows = a.drawn.shape[0]
    VERIFY.ids("draft_tokens", a.draft_tokens, a.drawn, (rows,))
    VERIFY.ids("tokens", a.tokens, a.drawn, (None, None))
    requests, columns = a.tokens.shape
    VERIFY.integer("requests", requests, 0, MAX_ROWS)
    VERIFY.integer("num_drafts", columns - 1, 0, MAX_ROWS)
    VERIFY.rows_apart("tokens", a.tokens, columns)
    VERIFY.tensor("lengths", a.lengths, a.drawn, torch.int32, (requests,))
    if a.starts is not None:
        VERIFY.tensor("starts", a.starts, a.drawn, torch.int32, (requests + 1,))
    if a.starts is None and rows != requests * columns:
        raise VERIFY.fail("logits", f"1 + num_drafts = {columns} rows for each request", rows)
    VERIFY.memory(a)
