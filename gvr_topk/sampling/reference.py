"""The sampler on a CPU: it filters each row by a sort, and draws with the numbers of `arithmetic`.

The kernels give the same tokens, sets and log-probabilities to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gvr_topk.sampling import arithmetic as numbers
from gvr_topk.sampling.arguments import (
    LIMIT_WORDS,
    SLOT_PARAMETERS,
    ApplyLimitsArguments,
    Flag,
    LimitsArguments,
    LogprobMode,
    Noise,
    Order,
    RenormArguments,
    SampleArguments,
    TopkLogprobsArguments,
    VerifyArguments,
)
from gvr_topk.sampling.arithmetic import Array

_ZERO, _ONE = np.float32(0), np.float32(1)
_MIXED_AT_ONCE = 1 << 22  # (draw, token) pairs whose noise is in memory at a time


@dataclass(frozen=True)
class Setting:
    """The parameters of one row."""

    temperature: np.float32 = _ONE
    top_k: int = 0
    top_p: np.float32 = _ONE
    min_p: np.float32 = _ZERO
    order: int = Order.VLLM

    def filters(self, width: int) -> bool:
        """Whether a filter is active in rows of this width."""
        return 0 < self.top_k < width or bool(self.top_p < 1) or bool(self.min_p > 0)


class Row:
    """The logits of one row, with NaN and what is not allowed as -inf, and their keys; `top` is the largest.

    `stand_in` is the token of a row without a candidate: the smallest allowed id that is not NaN, or 0.
    """

    def __init__(self, values: Array, allowed: Array | None = None) -> None:
        nan = np.isnan(values)
        usable = ~nan if allowed is None else ~nan & allowed
        self.values = np.where(usable, values, np.float32(-np.inf))
        self.keys = numbers.order_keys(self.values)
        self.top = int(self.keys.max())
        self.flags = Flag(0)
        if (nan if allowed is None else nan & allowed).any():
            self.flags |= Flag.NAN
        if self.top == numbers.KEY_NEGATIVE_INFINITY:
            self.flags |= Flag.NO_CANDIDATE
        self.stand_in = int(usable.argmax())

    @property
    def has_candidate(self) -> bool:
        """Whether a logit is above -inf."""
        return Flag.NO_CANDIDATE not in self.flags

    @property
    def least_candidate(self) -> int:
        """The smallest key that a candidate may have: above -inf, and that of +inf in a row with +inf."""
        return self.top if self.top == numbers.KEY_INFINITY else numbers.KEY_LEAST_FINITE

    def candidates(self) -> Array:
        """Ids of the candidates, ascending."""
        return np.flatnonzero(self.keys >= self.least_candidate)

    def distances(self, ids: Any = slice(None)) -> Array:
        """Logits minus the largest."""
        return numbers.distances(self.values[ids], self.keys[ids], self.top, self.maximum)

    @property
    def maximum(self) -> np.float32:
        """The largest logit."""
        return self.values[self.keys.argmax()] + np.float32(0)

    def rank(self, token: int) -> int:
        """Count the logits that are not below that of a token."""
        return int((self.keys >= self.keys[token]).sum())

    def raw_log_probabilities(self, ids: Any) -> Array:
        """Log-probabilities at temperature 1 of the whole row."""
        if not self.has_candidate:
            return np.where(np.asarray(ids) == self.stand_in, np.float32(0), np.float32(-np.inf))
        total = int(numbers.masses(self.distances(), numbers.mass_scale(_ONE)).sum())
        return numbers.log_probabilities(self.distances(ids), _ONE, numbers.log_mass(total))


@dataclass(frozen=True)
class Kept:
    """What a setting keeps of a row.

    The tokens ascend; beside them stand their logits minus the row's largest, and their masses. The
    temperature is 1 where one token is kept without regard to mass. The threshold is the smallest key that is
    kept, and the last id that is kept at this key.
    """

    ids: Array
    distance: Array
    mass: Array
    temperature: np.float32
    threshold: tuple[int, int]

    @property
    def total(self) -> int:
        """Sum of the masses."""
        return int(self.mass.sum())

    def log_probabilities(self) -> Array:
        """Log-probabilities of the kept tokens among themselves."""
        return numbers.log_probabilities(self.distance, self.temperature, numbers.log_mass(self.total))


def keep(row: Row, setting: Setting) -> Kept:
    """Filter a row."""
    if not row.has_candidate or numbers.is_greedy(setting.temperature) or setting.top_k == 1:
        token = int(row.keys.argmax()) if row.has_candidate else row.stand_in
        top_mass = np.array([numbers.MAX_MASS], np.uint64)
        return Kept(np.array([token]), np.zeros(1, np.float32), top_mass, _ONE, (row.top, token))
    width = len(row.keys)
    ids = row.candidates()
    threshold = (row.least_candidate, width - 1)
    if setting.filters(width):
        by_rank = ids[np.argsort(~row.keys[ids], kind="stable")]
        best = by_rank[: _prefix(row.distances(by_rank), setting)]
        threshold = (int(row.keys[best[-1]]), int(best[-1]))
        ids = np.sort(best)
    distance = row.distances(ids)
    mass = numbers.masses(distance, numbers.mass_scale(setting.temperature))
    return Kept(ids, distance, mass, setting.temperature, threshold)


def _prefix(distance: Array, setting: Setting) -> int:
    """Count the candidates that the filters keep; the candidates' distances stand in their ranking."""
    last = setting.order == Order.TEMPERATURE_LAST
    mass = numbers.masses(distance, numbers.mass_scale(_ONE if last else setting.temperature))
    sums = np.cumsum(mass)
    by_k = min(setting.top_k, len(mass)) if setting.top_k > 0 else len(mass)
    by_min_p = int((mass >= numbers.min_p_mass(setting.min_p)).sum())
    # What top-p counts as 1: what the filters before it leave.
    before = {Order.VLLM: min(by_k, by_min_p), Order.JOINT: len(mass)}.get(Order(setting.order), by_k)
    cut = numbers.top_p_mass(setting.top_p, int(sums[before - 1]))
    by_p = int((sums[:before] - mass[:before] < cut).sum())
    return min(by_k, by_min_p, by_p)


def draw(kept: Kept, row: Row, noise: int, seeds: Any, positions: Any) -> Array:
    """Draw tokens of one row, one for each seed and position."""
    seeds, positions = np.atleast_1d(seeds), np.atleast_1d(positions)
    if len(kept.ids) == 1:
        return np.repeat(kept.ids, len(positions))
    if noise == Noise.CDF:
        targets = numbers.draw_targets(numbers.uniform64(seeds, positions), kept.total)
        return kept.ids[np.searchsorted(np.cumsum(kept.mass), targets, side="right")]
    values = row.values[kept.ids] if row.top != numbers.KEY_INFINITY else kept.distance
    with np.errstate(over="ignore"):
        scaled = values / kept.temperature
    tokens = np.empty(len(positions), np.int64)
    step = max(1, _MIXED_AT_ONCE // len(kept.ids))
    for start in range(0, len(positions), step):
        part = slice(start, start + step)
        hashes = numbers.hash32(seeds[part, None], positions[part, None], kept.ids)
        tokens[part] = kept.ids[(scaled + numbers.gumbel(hashes)).argmax(axis=1)]
    return tokens


def limit_words(row: Row, kept: Kept) -> Array:
    """Return the limits of a row, 8 words."""
    words = np.zeros(LIMIT_WORDS, np.uint32)
    words[:2] = kept.threshold
    words[2:4] = np.array([row.maximum, kept.temperature], np.float32).view(np.uint32)
    words[4:6] = len(kept.ids), int(row.flags)
    words[6:8] = kept.total & 0xFFFFFFFF, kept.total >> 32
    return words.view(np.int32)


def _values(logits: Tensor) -> Array:
    result: Array = logits.detach().to(torch.float32).numpy()
    return result


def _allowed(a: SampleArguments | LimitsArguments, r: int) -> Array | None:
    """Unpack the mask of a row; None if all tokens are allowed."""
    if a.allow is None:
        return None
    mask = r if a.allow_row is None else int(a.allow_row[r])
    if not 0 <= mask < a.allow.shape[0]:
        return None
    words = a.allow[mask].contiguous().numpy().astype("<i4").view(np.uint8)
    return np.unpackbits(words, bitorder="little")[: a.logits.shape[1]].astype(bool)


def _slots(a: SampleArguments) -> Array:
    """Return the slot of each row; -1 if the row is skipped."""
    rows = a.logits.shape[0]
    if a.slots is None:
        return np.arange(rows)
    slots = a.slots.numpy().astype(np.int64)
    counts = [tensor.shape[0] for name in SLOT_PARAMETERS if (tensor := getattr(a, name)) is not None]
    return np.where(slots < min(counts, default=np.inf), slots, -1)


def _parameter(a: SampleArguments, name: str, index: int) -> Any:
    tensor = getattr(a, name)
    value = getattr(a, f"{name}_value") if tensor is None else tensor[index].item()
    return np.float32(value) if SLOT_PARAMETERS.get(name) == torch.float32 else value


def sample(a: SampleArguments) -> None:
    """Serve one call of the sampler; CPU tensors only, checked already."""
    for r, slot in enumerate(_slots(a).tolist()):
        if slot < 0:
            _skip(a, r)
            continue
        row = Row(_values(a.logits[r]), _allowed(a, r))
        temperature, top_k, top_p, min_p = (
            _parameter(a, name, slot) for name in ("temperature", "top_k", "top_p", "min_p")
        )
        kept = keep(row, Setting(temperature, top_k, top_p, min_p, a.order))
        seed, position = _parameter(a, "seeds", slot), _parameter(a, "positions", r)
        _write(a, r, row, kept, int(draw(kept, row, a.noise, seed, position)[0]))


def _skip(a: SampleArguments, r: int) -> None:
    """Write what a row without a request gets."""
    a.out[r] = -1
    for tensor in (a.logprobs, a.ranks, a.counts, a.limits, a.flags):
        if tensor is not None:
            tensor[r] = 0
    _write_kept(a, r, np.empty(0, np.int64), np.empty(0, np.float32))


def _write_kept(a: SampleArguments, r: int, ids: Array, logprobs: Array) -> None:
    for tensor, items, filler in ((a.kept, ids, -1), (a.kept_logprobs, logprobs, -np.inf)):
        if tensor is not None:
            items = items[: tensor.shape[1]]
            tensor[r] = filler
            tensor[r, : len(items)] = torch.from_numpy(items.copy())


def _write(a: SampleArguments, r: int, row: Row, kept: Kept, token: int) -> None:
    """Write all outputs of a row."""
    a.out[r] = token
    if a.logprobs is not None and a.logprob_mode == LogprobMode.RAW:
        a.logprobs[r] = float(row.raw_log_probabilities([token])[0])
    elif a.logprobs is not None:
        a.logprobs[r] = float(kept.log_probabilities()[np.searchsorted(kept.ids, token)])
    if a.ranks is not None:
        a.ranks[r] = row.rank(token)
    if a.counts is not None:
        a.counts[r] = len(kept.ids)
    if a.kept is not None:
        _write_kept(a, r, kept.ids, kept.log_probabilities())
    if a.limits is not None:
        a.limits[r] = torch.from_numpy(limit_words(row, kept))
    if a.flags is not None:
        overflow = a.kept is not None and len(kept.ids) > a.kept.shape[1]
        a.flags[r] = int(row.flags | (Flag.KEPT_OVERFLOW if overflow else 0))


def _kept_by_limits(row: Row, words: Array) -> Array:
    """Which tokens a row's limits keep."""
    key, last = int(words[0]), int(words[1])
    ids = np.arange(len(row.keys))
    if words[5] & Flag.NO_CANDIDATE:
        return ids == last
    return (row.keys > key) | ((row.keys == key) & (ids <= last))


def apply_limits_(a: ApplyLimitsArguments) -> None:
    """Serve one call of `gvr_topk.sampling.apply_limits_`; CPU tensors only, checked already."""
    for r, words in enumerate(a.limits.numpy().view(np.uint32)):
        if words[4] > 0:
            inside = _kept_by_limits(Row(_values(a.logits[r]), _allowed(a, r)), words)
            a.logits[r, torch.from_numpy(~inside)] = -torch.inf


def renorm(a: RenormArguments) -> None:
    """Serve one call of `gvr_topk.sampling.renorm`; CPU tensors only, checked already."""
    for r, words in enumerate(a.limits.numpy().view(np.uint32)):
        row = Row(_values(a.logits[r]), _allowed(a, r))
        a.out[r] = 0  # which may be the memory of the logits
        if words[4] == 0:
            continue
        inside = np.flatnonzero(_kept_by_limits(row, words))
        maximum, temperature = words[2:4].view(np.float32)
        top = int(numbers.order_keys(words[2:3].view(np.float32))[0])
        distance = numbers.distances(row.values[inside], row.keys[inside], top, maximum)
        mass = numbers.masses(distance, numbers.mass_scale(temperature))
        total = int(words[6]) | int(words[7]) << 32
        a.out[r, torch.from_numpy(inside)] = torch.from_numpy((mass / np.float64(total)).astype(np.float32))


def verify(a: VerifyArguments) -> None:
    """Accept the drafts of one call of `gvr_topk.sampling.verify`; CPU tensors only, checked already."""
    rows, columns = a.drawn.shape[0], a.tokens.shape[1]
    starts = torch.arange(0, rows + 1, columns) if a.starts is None else a.starts
    row = starts[:-1, None] + torch.arange(columns)
    inside = (row >= 0) & (row < starts[1:, None].clamp(max=rows))
    row = row.where(inside, rows)  # behind all rows, where no token stands
    tokens, drafts = (pad(ids, (0, 1), value=-1)[row] for ids in (a.drawn, a.draft_tokens))
    stays = tokens >= 0
    stays[:, 1:].logical_and_(tokens[:, :-1] == drafts[:, 1:])
    stays = stays.cumprod(1)
    a.tokens.copy_(tokens.where(stays > 0, -1))
    a.lengths.copy_(stays.sum(1))


def topk_logprobs(a: TopkLogprobsArguments) -> None:
    """Serve one call of `gvr_topk.sampling.topk_logprobs`; CPU tensors only, checked already."""
    width = a.logits.shape[1]
    for r, token in enumerate(a.sampled.tolist()):
        row = Row(_values(a.logits[r]))
        known = 0 <= token < width
        best = np.argsort(~row.keys, kind="stable")[: a.n]
        ids = np.concatenate([[token if known else 0], best])
        logprobs = row.raw_log_probabilities(ids)
        a.ranks[r] = row.rank(token) if known else 0
        if not known:
            ids[0], logprobs[0] = -1, 0
        a.ids[r] = torch.from_numpy(ids)
        a.logprobs[r] = torch.from_numpy(logprobs)
