"""The two predictors of the k-th value, and the state that a step leaves for them.

The z-score predictor says that the k-th value stands as many standard deviations from the mean of a fixed
sample of the row as in the last step. The value predictor says that the k-th value stays the same. Each
remembers how far off it has been, and its interval reaches a little further than that. The predictor that was
closer recently is used.

The arithmetic is float32, in the kernels' order. Kernels take approximate reciprocals and roots, and a
compiler may fuse a product and a sum. So a mean, a deviation and what follows from them may differ in the
last bits. A prediction by value uses neither mean nor deviation: from the same state it is the same, bit for
bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gvr_topk.constants import (
    STATE_INFINITE,
    STATE_MASKED,
    STATE_MAX_ZSCORE,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    GuessSource,
)
from gvr_topk.evaluation.shipped_types import (
    EPSILON,
    KEY_LEAST_FINITE,
    KEY_MOST_FINITE,
    KEY_ZERO,
    THREADS,
    WARPS,
    F,
    Floats,
    Ints,
    KeyInterval,
    Row,
    StepState,
    finite_interval,
    key_of,
    value_of,
)

NEIGHBOURS = 4
"""Consecutive elements that a thread looks at together."""
LOOK = 32
"""Elements that eight neighbouring threads look at together. So the sample touches few lines of memory, and
is no worse."""

LEAST_COUNTED = F(0.125)
"""A sample of which less than this share is finite is not used, because it says too little."""
MAX_OFFSET_SIGMAS = F(64.0)
"""If the mean is further from zero than this many deviations, the sums of squares give no usable
deviation."""

ERROR_DECAY, CENTRE_STEP = F(0.9), F(0.5)
"""An error shrinks by a tenth per step; the expected value moves half of the way to the value that was
found."""
BEYOND_LIMIT = F(4.0)
"""Errors may exceed the limit of intervals by this factor, so that they still show which predictor is
closer."""
UNKNOWN_DENSITY = F(2.0**-13)
"""Width of an interval per element, as a part of the value, if it is not known how dense elements are."""


@dataclass(frozen=True)
class PredictorTuning:
    """How wide intervals are.

    An error is at least a factor times how far the last prediction was off. The ``*_inside`` parameters bound
    it by the width of so many elements.

    Attributes
    ----------
    first_z_error, min_z_error : float32
        First error of a z-score, and its least error.
    z_factor, value_factor : float32
        Error for each unit that a prediction was off.
    first_inside, min_inside, max_inside : float32
        Elements in the first interval, in the narrowest and in the widest.
    """

    first_z_error: np.float32
    min_z_error: np.float32
    z_factor: np.float32
    value_factor: np.float32
    first_inside: np.float32
    min_inside: np.float32
    max_inside: np.float32


TUNING = PredictorTuning(F(0.05), F(0.016), F(1.6), F(1.3), F(600.0), F(250.0), F(1500.0))
TUNING_FEW_CTAS = PredictorTuning(F(0.08), F(0.02), F(2.0), F(1.6), F(900.0), F(600.0), F(3000.0))
"""Wider intervals for rows with one CTA or two, because these rows take longest to be read again."""


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """``a * b + c``, rounded once (twice where float64 falls short, which one case in 2**29 does)."""
    return F(np.float64(a) * np.float64(b) + np.float64(c))


def reciprocal(x: np.float32) -> np.float32:
    """``1 / x``; the kernels' is approximate."""
    return F(F(1.0) / F(x))


def standard_deviation(variance: np.float32) -> np.float32:
    """Return a variance's square root, negative if rounding made the variance so; kernels approximate it."""
    return F(variance / np.sqrt(np.fmax(variance, F(1e-30))))


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of the row's sample.

    Attributes
    ----------
    mean, deviation : float32
    counted : int
        Threads whose looks were all finite and inside the row; -1 if no sample was taken.
    known : bool
        Whether there are enough such threads, and rounding has not made the deviation negative.
    """

    mean: np.float32
    deviation: np.float32
    counted: int
    known: bool


NO_SAMPLE = Moments(F(0.0), F(0.0), -1, True)
"""Moments of a launch that reads no state, and so takes no sample: its deviation of zero gives no z-score."""
UNKNOWN_MOMENTS = Moments(F(0.0), F(0.0), -1, False)
"""Moments of the fallback kernel, which takes no sample either: it predicts from a value alone, and leaves
one."""


def hashed(number: Ints) -> Ints:
    """Hash numbers to 32 bits. Even distances would see bunched scores more often than is right."""
    number = number * 2654435761 & 0xFFFFFFFF
    return (number ^ number >> 15) * 2246822519 & 0xFFFFFFFF


def hashed_position(number: Ints, span: int) -> Ints:
    """Return a multiple of four in a row of `span` elements, for each number."""
    whole = span & -NEIGHBOURS if span >= NEIGHBOURS else span
    # The product has up to 53 bits: 32 of the number and 21 of the longest row.
    return (hashed(number) * whole >> 32) & -NEIGHBOURS


def sample_moments(row: Row) -> Moments:
    """Return mean and deviation of a sample at the same positions of the buffer in every step.

    The sampling error is then the same in every step, and cancels. Every CTA takes the whole sample, so that
    no CTA waits for another. Sums are added up in the order of the threads, warps and lanes of the kernels.
    """
    looks = 2 if row.plan.family == "streaming" and row.log2_ctas < 2 else 1
    span = row.length if row.is_laid_out_anew else row.width
    thread = np.arange(THREADS, dtype=np.int64)
    counts = np.ones(THREADS, dtype=bool)
    total, squares = np.zeros(THREADS, dtype=np.float32), np.zeros(THREADS, dtype=np.float32)
    for look in range(looks):
        line = hashed_position((look * THREADS + thread) // 8, span & -LOOK) & -LOOK
        at = line + NEIGHBOURS * (thread % 8)
        counts &= at + NEIGHBOURS <= row.length
        for e in range(NEIGHBOURS):
            seen = row.values[np.minimum(at + e, row.width - 1)]
            total = total + seen
            squares = (seen.astype(np.float64) ** 2 + squares).astype(np.float32)
    counts &= squares < np.inf  # false for infinity and NaN
    counted = int(np.count_nonzero(counts))
    share = reciprocal(F(looks * NEIGHBOURS * counted))
    mean = F(_sum(np.where(counts, total, F(0.0))) * share)
    variance = F(F(_sum(np.where(counts, squares, F(0.0))) * share) - F(mean * mean))
    deviation = standard_deviation(variance)
    known = counted >= LEAST_COUNTED * THREADS and deviation >= 0
    return Moments(mean, deviation, counted, bool(known))


def _sum(numbers: Floats) -> np.float32:
    """Add up one number per thread: lanes in pairs 16, 8, 4, 2 and 1 apart, then warps in pairs."""
    rest = numbers.reshape(WARPS, 32)
    while rest.shape[1] > 1:
        half = rest.shape[1] // 2
        rest = rest[:, :half] + rest[:, half:]
    warps = rest.reshape(4, 4)
    fours = (warps[:, 0] + warps[:, 1]) + (warps[:, 2] + warps[:, 3])
    return F((fours[0] + fours[1]) + (fours[2] + fours[3]))


def predicted(moments: Moments, state: StepState) -> KeyInterval:
    """Return the interval of the predictor that was closer recently; `state` must hold a value.

    Parameters
    ----------
    moments : Moments
        Moments of this step's sample; unused if the value predictor is used.
    state : StepState
        What the step before left.

    Returns
    -------
    KeyInterval
        Its source is `GuessSource.VALUE` or `GuessSource.ZSCORE`.
    """
    centre, half_width = state.value, state.value_error
    by_value = bool(state.packed_errors & 1)
    if by_value:
        half_width = np.fmin(half_width, state.limit)
    elif moments.known:
        z, error = state.z_score, np.fmin(state.z_error, state.limit)
        centre = fma(z, moments.deviation, moments.mean)
        half_width = F(fma(error, abs(z), error) * moments.deviation)
    return finite_interval(
        key_of(F(centre - half_width)),
        key_of(F(centre + half_width)),
        GuessSource.VALUE if by_value else GuessSource.ZSCORE,
    )


def next_state(
    row: Row, last: StepState, moments: Moments, kth: int, used: KeyInterval, inside: int, equal: int
) -> StepState:
    """Return the state that a step leaves.

    Parameters
    ----------
    row : Row
    last : StepState
        What the step before left.
    moments : Moments
        Moments of this step's sample.
    kth : int
        The k-th key, or the lower edge of a histogram bin all of whose elements were selected.
    used : KeyInterval
        The last interval of the step.
    inside, equal : int
        Elements in `used`, and those of them at its tie key.

    Returns
    -------
    StepState
    """
    if kth > KEY_MOST_FINITE:
        return StepState(F(STATE_INFINITE))
    if kth < KEY_LEAST_FINITE:
        return StepState(F(STATE_MASKED))
    by = TUNING_FEW_CTAS if row.log2_ctas < 2 else TUNING
    value = value_of(kth)
    # Zeros, which are counted in any case, say nothing about how dense other elements are.
    density = _width_per_element(row, value, used, inside - (equal if used.tie_key == KEY_ZERO else 0))
    limit = F(by.max_inside * density)
    value_error, expected = F(by.first_inside * density), value
    if last.has_value:
        move = F(value - last.value)
        value_error = np.fmax(F(ERROR_DECAY * last.value_error), F(by.value_factor * abs(move)))
        expected = fma(CENTRE_STEP, move, last.value)
    value_error = np.fmin(np.fmax(value_error, F(by.min_inside * density)), F(BEYOND_LIMIT * limit))
    if not moments.known or not abs(moments.mean) <= F(MAX_OFFSET_SIGMAS * moments.deviation):
        return StepState(F(STATE_VALUE_ONLY), expected, limit, _packed(F(0.0), value_error, True))

    z = F(F(value - moments.mean) * reciprocal(moments.deviation))
    further = F(F(1.0) + abs(z))
    unit = reciprocal(F(further * moments.deviation))
    z_limit = np.fmax(F(limit * unit), by.min_z_error)
    z_error, centre = by.first_z_error, z
    if last.has_z_score:
        move = F(z - last.z_score)
        off = F(F(by.z_factor * abs(move)) * reciprocal(further))
        z_error = np.fmax(F(ERROR_DECAY * last.z_error), off)
        centre = F(z - F(F(1.0) - CENTRE_STEP) * move)
    z_error = np.fmin(np.fmax(z_error, by.min_z_error), F(BEYOND_LIMIT * z_limit))
    if not abs(centre) < F(STATE_MAX_ZSCORE):
        return StepState(F(STATE_VALUE_ONLY), expected, limit, _packed(z_error, value_error, True))
    by_value = bool(F(value_error * unit) <= z_error)
    return StepState(
        F(F(STATE_ZSCORE_ORIGIN) + centre),
        expected,
        limit if by_value else z_limit,
        _packed(z_error, value_error, by_value),
    )


def _width_per_element(row: Row, value: np.float32, used: KeyInterval, inside: int) -> np.float32:
    """Return half the interval's width per element inside; a guess if the interval covers all numbers."""
    width = fma(abs(value), EPSILON[row.dtype], F(used.high - used.low))
    if width < value_of(KEY_MOST_FINITE):
        return F(F(F(0.5) * width) * reciprocal(F(max(inside, 1))))
    return F(UNKNOWN_DENSITY * abs(value))


def _packed(z_error: np.float32, value_error: np.float32, by_value: bool) -> int:
    """Pack two errors, cut to the upper halves of their 32 bits, and which predictor to use."""
    z_bits, value_bits = (int(np.array([x], np.float32).view(np.uint32)[0]) for x in (z_error, value_error))
    return (((z_bits & 0xFFFF0000) | value_bits >> 16) & ~1) | int(by_value)
