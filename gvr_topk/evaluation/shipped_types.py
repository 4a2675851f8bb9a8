"""The data that the model of the shipped kernels works on: keys, intervals of keys, a row, a slot's state.

Keys are `gvr_topk.contract.order_key`'s: unsigned 32-bit numbers, which compare as the contract compares
scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gvr_topk.constants import (
    STATE_INFINITE,
    STATE_MAX_ZSCORE,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    GuessSource,
)
from gvr_topk.contract import KEY_NAN, order_key
from gvr_topk.policy import Plan

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
F = np.float32
ZERO = F(0.0)

KEY_ABSENT = 0
"""Key below that of every score: the key of what lies behind the end of a row."""
KEY_LEAST = 1
KEY_NEG_INF = 0x007FFFFF
KEY_LEAST_FINITE = KEY_NEG_INF + 1
KEY_ZERO = 0x80000000
KEY_POS_INF = 0xFF800000
KEY_MOST_FINITE = KEY_POS_INF - 1

THREADS, WARPS, LANES = 512, 16, 32
"""Threads of a CTA, its warps, and the lanes of a warp."""

INVARIANT_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a dtype's keys that tell nothing about the score: a search over keys leaves them out."""
EPSILON = {torch.float32: F(2.0**-23), torch.bfloat16: F(2.0**-7), torch.float16: F(2.0**-10)}
"""Largest distance from a number to the next one of its dtype, as a part of the number."""


def keys_of(values: Floats) -> Ints:
    """Keys of an array of float32."""
    return order_key(torch.from_numpy(np.ascontiguousarray(values))).numpy()


def key_of(value: np.float32) -> int:
    """Key of one float32."""
    return int(keys_of(np.array([value], dtype=np.float32))[0])


def value_of(key: int) -> np.float32:
    """Return the float32 that has this key; NaN, or minus zero, if no score has the key."""
    bits = key ^ 0x80000000 if key & 0x80000000 else ~key & 0xFFFFFFFF
    return F(np.array([bits], dtype=np.uint32).view(np.float32)[0])


def whole_key(key: int, invariant_bits: int) -> int:
    """Restore the invariant bits of a shifted key: ones below zero and in NaN, zeros above zero."""
    whole = key << invariant_bits
    ends_in_ones = whole < KEY_ZERO or key == KEY_NAN >> invariant_bits
    return whole | ((1 << invariant_bits) - 1) if ends_in_ones else whole


@dataclass(frozen=True)
class KeyInterval:
    """An inclusive range of keys in which the k-th key is believed, or known, to lie.

    Attributes
    ----------
    lo, hi : int
        Both ends of the range.
    source : GuessSource
        Where the interval came from.
    """

    lo: int
    hi: int
    source: GuessSource = GuessSource.NONE

    @property
    def low(self) -> np.float32:
        """The lower end as a score."""
        return value_of(self.lo)

    @property
    def high(self) -> np.float32:
        """The upper end as a score. Minus zero's key, just below zero's, is skipped: no score has it."""
        return value_of(self.hi - 1 if self.hi == KEY_ZERO - 1 else self.hi)

    @property
    def tie_key(self) -> int:
        """The one key inside that is counted instead of listed, because many elements may share it.

        It is the interval's only key, or zero, which a ReLU gives to most of a row; else `KEY_ABSENT`.
        """
        if self.lo == self.hi:
            return self.lo
        return KEY_ZERO if self.lo <= KEY_ZERO <= self.hi else KEY_ABSENT

    def holds_key(self, key: int) -> bool:
        return self.lo <= key <= self.hi


EVERYTHING = KeyInterval(KEY_LEAST, KEY_NAN)


def only(key: int) -> KeyInterval:
    """Return the interval of one key."""
    return KeyInterval(key, key)


def finite_interval(lo: int, hi: int, source: GuessSource) -> KeyInterval:
    """Return an interval whose ends are finite, or both infinity; what it leaves out is found later."""
    if min(lo, hi) >= KEY_POS_INF:
        return KeyInterval(KEY_POS_INF, KEY_POS_INF, source)
    hi = min(max(hi, KEY_LEAST_FINITE), KEY_MOST_FINITE)
    return KeyInterval(max(min(lo, hi), KEY_LEAST_FINITE), hi, source)


@dataclass(frozen=True)
class StepState:
    """What one step leaves for the next: one slot of `gvr_topk.TopkState`, 16 bytes.

    Attributes
    ----------
    first : float32
        Kind of the state (`gvr_topk.constants`). Within `STATE_MAX_ZSCORE` of `STATE_ZSCORE_ORIGIN` it is
        that origin plus a z-score; above come `STATE_VALUE_ONLY`, `STATE_INFINITE` and `STATE_MASKED`. No
        step leaves numbers between these, but they predict something as well. Negative numbers other than
        `STATE_UNKNOWN` are the value window of a short row.
    value : float32
        The k-th value that is expected next.
    limit : float32
        How far an interval may reach, in the unit of the predictor that is used.
    packed_errors : int
        32 bits: the z-score's error as a bfloat16, then the value's error, whose last bit is set if the value
        predictor is used.
    """

    first: np.float32
    value: np.float32 = ZERO
    limit: np.float32 = ZERO
    packed_errors: int = 0

    @classmethod
    def of_tensor(cls, slot: Tensor) -> StepState:
        """Return the state in a tensor of four float32."""
        numbers = slot.detach().cpu().contiguous()
        first, value, limit, _ = numbers.numpy()
        return cls(first, value, limit, int(numbers.view(torch.int32)[3]) & 0xFFFFFFFF)

    def tensor(self) -> Tensor:
        """Return the state as four float32; the packed errors keep their bits, even if these make a NaN."""
        numbers = torch.tensor([self.first, self.value, self.limit, 0.0], dtype=torch.float32)
        signed = self.packed_errors - (1 << 32) if self.packed_errors >> 31 else self.packed_errors
        numbers.view(torch.int32)[3] = signed
        return numbers

    @property
    def has_z_score(self) -> bool:
        return bool(abs(self.first - F(STATE_ZSCORE_ORIGIN)) <= F(STATE_MAX_ZSCORE))

    @property
    def is_known(self) -> bool:
        """Whether kernels that share a row among CTAs can predict from the state. A NaN is not known."""
        return bool(self.first >= F(STATE_ZSCORE_ORIGIN - STATE_MAX_ZSCORE))

    @property
    def has_value(self) -> bool:
        return self.is_known and bool(self.first <= F(STATE_VALUE_ONLY))

    @property
    def is_infinite(self) -> bool:
        """The k-th value was infinity or NaN."""
        return self.is_known and not self.has_value and bool(self.first <= F(STATE_INFINITE))

    @property
    def is_masked(self) -> bool:
        """The k-th value was -inf."""
        return self.is_known and bool(self.first > F(STATE_INFINITE))

    @property
    def uses_value(self) -> bool:
        """Whether the value predictor is used, which needs no sample of the row."""
        return self.has_value and bool(self.packed_errors & 1)

    @property
    def z_score(self) -> np.float32:
        return F(self.first - F(STATE_ZSCORE_ORIGIN))

    @property
    def z_error(self) -> np.float32:
        """How far off the z-score may be at the mean; for each deviation further out, as much is added."""
        return F(np.array([self.packed_errors & 0xFFFF0000], dtype=np.uint32).view(np.float32)[0])

    @property
    def value_error(self) -> np.float32:
        return F(np.array([self.packed_errors << 16 & 0xFFFFFFFF], dtype=np.uint32).view(np.float32)[0])


UNKNOWN = StepState(F(STATE_UNKNOWN))


@dataclass(frozen=True)
class Row:
    """One row, and how the kernels lay it out.

    Attributes
    ----------
    values : ndarray, shape [width], float32
        The whole buffer of the row, widened to float32. Only the sample looks at what lies behind the row's
        end, and does not count it.
    length : int
        Elements of the row itself.
    k : int
        Items wanted.
    dtype : torch.dtype
        Dtype of the scores.
    plan : Plan
        Plan of the launch.
    """

    values: Floats
    length: int
    k: int
    dtype: torch.dtype
    plan: Plan

    @cached_property
    def keys(self) -> Ints:
        """Keys of the elements, shape [length]."""
        return keys_of(self.values[: self.length])

    @property
    def width(self) -> int:
        return len(self.values)

    @property
    def invariant_bits(self) -> int:
        return INVARIANT_BITS[self.dtype]

    @property
    def per_vector(self) -> int:
        """Elements of a 16-byte load."""
        return 16 // self.dtype.itemsize

    @property
    def ctas(self) -> int:
        return self.plan.ctas_per_row

    @property
    def log2_ctas(self) -> int:
        return self.ctas.bit_length() - 1

    @property
    def segment(self) -> int:
        """Keys that one CTA may list."""
        return self.plan.list_capacity >> self.log2_ctas

    @property
    def is_laid_out_anew(self) -> bool:
        """Whether the row is so much shorter than its buffer that it is laid out, and sampled, by its length.

        Otherwise it is laid out by its buffer, because loads of all of the buffer start before the length is
        known.
        """
        if self.plan.family == "resident":
            return 2 * self._groups(self.length) <= self._groups(self.width)
        return self.plan.family == "streaming" and self.length <= self.width >> 2

    @cached_property
    def warp_starts(self) -> Ints:
        """First position of every warp's part, the cluster's warps in order; shape [16 ctas + 1]."""
        warp = np.arange(self.ctas * WARPS + 1, dtype=np.int64)
        if self.plan.family == "resident":
            groups = self._groups(self.length if self.is_laid_out_anew else self.width)
            first = (warp * groups + self.ctas * WARPS - 1) >> (self.log2_ctas + 4)
            return np.minimum(first * LANES * self.per_vector, self.length)
        return np.minimum(warp * self._warp_span(), self.length)

    @cached_property
    def cta_starts(self) -> Ints:
        """First position of every CTA's part; shape [ctas + 1]. CTAs own consecutive elements."""
        steps = -(-self._warp_span() // (LANES * 16))
        if self.plan.family == "fallback" and steps > 1:
            return np.minimum(np.arange(self.ctas + 1) * steps * THREADS * 16, self.length)
        return self.warp_starts[::WARPS]

    def by_fallback(self) -> Row:
        """The same row as the fallback kernel lays it out."""
        return replace(self, plan=replace(self.plan, family="fallback"))

    def _groups(self, elements: int) -> int:
        """Number of groups of 32 vectors; the warps share these groups out among themselves."""
        return -(-elements // (LANES * self.per_vector))

    def _warp_span(self) -> int:
        share = -(-self.length // (self.ctas * WARPS))
        group = LANES * self.per_vector
        return -(-share // group) * group
