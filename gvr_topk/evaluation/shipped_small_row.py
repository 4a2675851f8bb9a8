"""Short rows: one CTA holds the row in registers, and needs no other CTA and no sample.

The last step leaves a window of values around its k-th value. With even bins of that window the k-th value
shares its bin with only a few others, so that one round is enough. Without a window, or if it misses, rounds
over the keys find the k-th value, whatever the row holds.

The window is kept in one float32. This number is negative, which no z-score is. Its exponent is that of the
window's radius, a power of two, and its mantissa is the k-th value in 64ths of the radius.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gvr_topk.constants import STATE_UNKNOWN, STATE_VALUE_ONLY
from gvr_topk.contract import KEY_NAN
from gvr_topk.evaluation.shipped_predictor import fma
from gvr_topk.evaluation.shipped_resolve_miss import Outcome
from gvr_topk.evaluation.shipped_select import RANK_DIRECTLY, Threshold, locate
from gvr_topk.evaluation.shipped_types import (
    THREADS,
    UNKNOWN,
    F,
    Floats,
    Ints,
    Row,
    StepState,
    keys_of,
    value_of,
    whole_key,
)

LOG2_BINS = 11
BINS = 1 << LOG2_BINS
UNITS, MOST_CENTRE = 64, 1 << 22
"""The window's centre is a multiple of a 64th of its radius, with a factor below `MOST_CENTRE`."""

SIGN, EXPONENT, MANTISSA = 0x80000000, 0x7F800000, 0x007FFFFF
LOWEST_EXPONENT = 1 << 23
LEAST_EXPONENT, MOST_EXPONENT = 67 << 23, 187 << 23
"""A step leaves only windows with radii from ``2**-60`` to ``2**60``."""

STEADY, FAR = BINS // 128, BINS // 32
"""Moves of the k-th value, in bins, below which a move is small, and from which on it is large."""
SPARSE, FEW, DENSE = 128, 512, 1024
"""Limits for the number of elements in the 128 bins around the k-th value."""


@dataclass(frozen=True)
class ValueWindow:
    """A window of values, kept as the number that encodes it.

    Attributes
    ----------
    bits : int
        The float32's 32 bits.
    """

    bits: int

    @property
    def exponent(self) -> int:
        return self.bits & EXPONENT

    @property
    def centre(self) -> int:
        mantissa = self.bits & MANTISSA
        return mantissa - (MANTISSA + 1) if mantissa > MANTISSA >> 1 else mantissa

    def bins(self, values: Floats) -> Ints:
        """Return the bin of each value; bin 0 for all values below the window.

        Greater values, and NaN, lie in no lower bins.
        """
        scale = _float_of(SIGN | ((253 << 23) - self.exponent))  # -1 / (2 radius)
        bias = fma(F(self.centre), F(0.5 / UNITS), F(0.5))
        depth = (values.astype(np.float64) * np.float64(scale) + np.float64(bias)).astype(np.float32)
        depth = np.clip(np.where(np.isnan(depth), F(0), depth), F(0), F(1))
        # Kernels add this to 2**23 + 2047, an odd number, and round to even: so halves go to the odd
        # multiple.
        exact = depth.astype(np.float64) * (BINS - 1)
        floor = np.floor(exact)
        rest = exact - floor
        up = (rest > 0.5) | ((rest == 0.5) & (floor % 2 == 0))
        bins: Ints = (BINS - 1 - floor - up).astype(np.int64)
        return bins

    def updated(self, hit: int, near: int) -> np.float32:
        """Return the next window, after the k-th value was found in bin `hit` with `near` elements around it.

        The window moves along with the k-th value. It widens where this value moves far, and narrows where it
        hardly moves or elements are dense, until bins hold about one element.
        """
        move = hit - BINS // 2
        exponent, centre = self.exponent, self.centre + (move >> 4)
        if abs(move) >= FAR and near < FEW:
            exponent, centre = exponent + LOWEST_EXPONENT, centre >> 1
        if near > DENSE or (abs(move) < STEADY and near > SPARSE):
            exponent, centre = exponent - LOWEST_EXPONENT, centre << 1
        return _packed(exponent, centre)


def known_window(state: StepState) -> ValueWindow | None:
    """Return the window that a state holds, or None. Radii of 2**126 and more have no scale."""
    first = state.first
    if first < 0 and first > F(-(2.0**126)) and first != F(STATE_UNKNOWN):
        return ValueWindow(_bits_of(first))
    return None


def shared_state(state: StepState) -> StepState:
    """Return the state from which a cluster that shares the row predicts.

    If the row has been short, the state tells the k-th value that the row's window lies around. A quarter of
    the radius reaches over as many elements as other predictions list.
    """
    window = known_window(state)
    if window is None:
        return state
    radius = _float_of(window.exponent)
    with np.errstate(all="ignore"):  # whatever the state holds, as on a GPU
        half_width = F(radius * F(0.25))
        value = F(F(window.centre) * F(radius / F(UNITS)))
    return StepState(F(STATE_VALUE_ONLY), value, half_width, _bits_of(half_width) >> 16 | 1)


def window_around(kth: np.float32, radius: np.float32) -> np.float32:
    """Return the window to leave after a step that had none; the radius is rounded down to a power of two."""
    exponent = _bits_of(radius) & EXPONENT
    centre = F(kth * _float_of(((260 << 23) - exponent) & 0xFFFFFFFF))
    return _packed(exponent, int(np.rint(centre)) if abs(centre) < MOST_CENTRE else MOST_CENTRE)


def _packed(exponent: int, centre: int) -> np.float32:
    """Pack a window; extreme radii, and centres that do not fit, become `STATE_UNKNOWN`."""
    if not (LEAST_EXPONENT <= exponent <= MOST_EXPONENT and abs(centre) < MOST_CENTRE):
        return F(STATE_UNKNOWN)
    bits = SIGN | exponent | (centre & MANTISSA)
    # One unit of the centre makes little difference, and keeps a window from being equal to STATE_UNKNOWN.
    return _float_of(bits + 1 if bits == _bits_of(F(STATE_UNKNOWN)) else bits)


def try_predicted_window(row: Row, held: Floats, window: ValueWindow) -> tuple[Outcome, np.float32] | None:
    """Try one round with the window of the last step.

    Parameters
    ----------
    row : Row
    held : ndarray, float32
        The row, and -inf behind it, up to the number of elements that the block holds.
    window : ValueWindow

    Returns
    -------
    (Outcome, float32) or None
        The outcome and the next window. None if the k-th value lies outside of the window, or shares its bin
        with too many elements.
    """
    bins = window.bins(held)
    hit, above = locate(bins, row.k)
    few = int(np.count_nonzero(bins == hit))
    if few > RANK_DIRECTLY or not 1 <= hit <= BINS - 2:
        return None
    near = int(np.count_nonzero(bins // 128 == hit // 128))
    threshold = _rank(keys_of(held[bins == hit]), row.k - above)
    outcome = Outcome(threshold, 1, few, 1, 0, True, UNKNOWN)
    return outcome, window.updated(hit, near)


def narrow_keys(row: Row, held: Floats, rounds: int) -> tuple[Outcome, np.float32]:
    """Run rounds over 11 bits of the key until one key is left, all of a range is wanted, or few are left.

    `rounds` is the number of failed rounds before these: one if a window has missed.
    """
    idle = row.invariant_bits
    keys = keys_of(held) >> idle
    first_shift = 32 - idle - LOG2_BINS
    base, range_length, rank, shift = 0, KEY_NAN >> idle, row.k, first_shift
    dense_bin, radix_rounds = 0, 0
    while True:
        bins = (keys - base) >> shift
        hit, above = locate(bins, rank)
        keys, rank = keys[bins == hit], rank - above
        radix_rounds += 1
        dense_bin = dense_bin or len(keys)
        base += hit << shift
        range_length = min(range_length - (hit << shift), (1 << shift) - 1)
        takes_all = rank == len(keys)
        if range_length == 0 or takes_all or len(keys) <= RANK_DIRECTLY:
            break
        shift = max(0, range_length.bit_length() - LOG2_BINS)
    kth = whole_key(base, idle)
    if takes_all:
        threshold, few = Threshold(kth, rank, rank), 0
    elif len(keys) > RANK_DIRECTLY:
        threshold, few = Threshold(kth, rank, len(keys)), len(keys)
    else:
        ranked = _rank(keys, rank)
        threshold, few = replace(ranked, key=whole_key(ranked.key, idle)), len(keys)
    left = _first_window(row, base, dense_bin, is_tied=few > RANK_DIRECTLY)
    return Outcome(threshold, 1, few, rounds + radix_rounds, radix_rounds, False, UNKNOWN), left


def _first_window(row: Row, base: int, dense_bin: int, *, is_tied: bool) -> np.float32:
    """Return a window so wide that about four elements share a bin; none around a value that many have."""
    idle = row.invariant_bits
    first_shift = 32 - idle - LOG2_BINS
    low = base >> first_shift << first_shift
    high = low | ((1 << first_shift) - 1)
    span = F(value_of(whole_key(high, idle)) - value_of(whole_key(low, idle)))
    radius = F(F(F(2 * BINS) * span) / F(dense_bin))
    return window_around(value_of(whole_key(base, idle)), F(0) if is_tied else radius)


def _rank(keys: Ints, rank: int) -> Threshold:
    """Return the threshold among few keys, found by comparing them with each other."""
    key = int(np.sort(keys)[::-1][rank - 1])
    return Threshold(key, rank - int(np.count_nonzero(keys > key)), int(np.count_nonzero(keys == key)))


def held_row(row: Row) -> Floats:
    """Return what the block holds: the row, then -inf. The top k are still the row's, by their positions."""
    held = np.full(max(THREADS * row.plan.values_per_thread, row.length), -np.inf, dtype=np.float32)
    held[: row.length] = row.values[: row.length]
    return held


def _bits_of(x: np.float32) -> int:
    return int(np.array([x], dtype=np.float32).view(np.uint32)[0])


def _float_of(bits: int) -> np.float32:
    return F(np.array([bits], dtype=np.uint32).view(np.float32)[0])
