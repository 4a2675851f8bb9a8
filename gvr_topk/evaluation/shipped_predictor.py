"""The two predictors of the k-th value, and what a step leaves for them.

One says that the k-th value stands as many standard deviations from the mean of a fixed sample of the row as
it did, the other that it is what it was. Each remembers how far off it has been, and the interval reaches a
little further than that. The one that was closer of late is gone by.

The arithmetic is float32, in the kernels' order. Kernels take approximate reciprocals and roots, and a
compiler may fuse a product and a sum, so that a mean, a deviation and what follows from them may differ in
the last bits. A prediction by value takes neither: from the same state it is the same, bit for bit.
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
"""Elements that eight neighbouring threads look at together: few lines of memory, and no worse a sample."""

LEAST_COUNTED = F(0.125)
"""A sample of which less than this share is finite says too little."""
MAX_OFFSET_SIGMAS = F(64.0)
"""Of a mean further from zero than so many deviations, sums of squares leave no deviation to speak of."""

ERROR_DECAY, CENTRE_STEP = F(0.9), F(0.5)
"""An error shrinks by a tenth a step; what is expected moves half of the way to what was found."""
BEYOND_LIMIT = F(4.0)
"""Errors may exceed what intervals are limited to, by so much: which predictor is closer is to be seen."""
UNKNOWN_DENSITY = F(2.0**-13)
"""Width for each element, as a part of the value, where nothing is known of how dense elements are."""


@dataclass(frozen=True)
class PredictorTuning:
    """How wide intervals are. An error is at least so many times the last one, and ``*_inside`` elements.

    Attributes
    ----------
    first_z_error, min_z_error : float32
        A z-score's first error, and its least.
    z_factor, value_factor : float32
        Error for each unit that a prediction was off.
    first_inside, min_inside, max_inside : float32
        Elements in an interval: the first, the narrowest, the widest.
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
"""Rows with one CTA or two take longest to be read again."""


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """``a * b + c``, rounded once (twice where float64 falls short, which one case in 2**29 does)."""
    return F(np.float64(a) * np.float64(b) + np.float64(c))


def reciprocal(x: np.float32) -> np.float32:
    """``1 / x``; the kernels' is approximate."""
    return F(F(1.0) / F(x))


def standard_deviation(variance: np.float32) -> np.float32:
    """Square root of a variance, negative where rounding left that so; the kernels' root is approximate."""
    return F(variance / np.sqrt(np.fmax(variance, F(1e-30))))


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of the row's sample.

    Attributes
    ----------
    mean, deviation : float32
    counted : int
        Threads all of whose looks were finite and inside the row; -1 where no sample was taken.
    known : bool
        Whether so many say something, and rounding has left a deviation.
    """

    mean: np.float32
    deviation: np.float32
    counted: int
    known: bool


NO_SAMPLE = Moments(F(0.0), F(0.0), -1, True)
"""Of a launch that reads no state, and so takes no sample: no deviation, of which no z-score comes."""
UNKNOWN_MOMENTS = Moments(F(0.0), F(0.0), -1, False)
"""Of the fallback kernel, which takes none either: it predicts, and leaves, a value alone."""


def hashed(number: Ints) -> Ints:
    """A number as if drawn by lot, 32 bits. Even places would see bunched scores more often than is right."""
    number = number * 2654435761 & 0xFFFFFFFF
    return (number ^ number >> 15) * 2246822519 & 0xFFFFFFFF


def hashed_position(number: Ints, span: int) -> Ints:
    """A multiple of four in a row of `span` elements, for each number."""
    whole = span & -NEIGHBOURS if span >= NEIGHBOURS else span
    # The product has up to 53 bits: 32 of the number and 21 of the longest row.
    return (hashed(number) * whole >> 32) & -NEIGHBOURS


def sample_moments(row: Row) -> Moments:
    """Mean and deviation of a sample at the same positions of the buffer in every step.

    Its own error is then the same in every step, and cancels. Every CTA takes the whole sample, so that none
    waits for another. Sums are added up in the order of the threads, warps and lanes of the kernels.
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
    counts &= squares < np.inf  # neither infinity nor NaN is
    counted = int(np.count_nonzero(counts))
    share = reciprocal(F(looks * NEIGHBOURS * counted))
    mean = F(_sum(np.where(counts, total, F(0.0))) * share)
    variance = F(F(_sum(np.where(counts, squares, F(0.0))) * share) - F(mean * mean))
    deviation = standard_deviation(variance)
    known = counted >= LEAST_COUNTED * THREADS and deviation >= 0
    return Moments(mean, deviation, counted, bool(known))


def _sum(numbers: Floats) -> np.float32:
    """Sum of a number for each thread: lanes in pairs 16, 8, 4, 2 and 1 apart, then warps in pairs."""
    rest = numbers.reshape(WARPS, 32)
    while rest.shape[1] > 1:
        half = rest.shape[1] // 2
        rest = rest[:, :half] + rest[:, half:]
    warps = rest.reshape(4, 4)
    fours = (warps[:, 0] + warps[:, 1]) + (warps[:, 2] + warps[:, 3])
    return F((fours[0] + fours[1]) + (fours[2] + fours[3]))


def predicted(moments: Moments, state: StepState) -> KeyInterval:
    """The interval of the predictor that was closer of late; `state` tells a value.

    Parameters
    ----------
    moments : Moments
        Of this step's sample; unused where the value predictor is gone by.
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
    """What a step leaves.

    Parameters
    ----------
    row : Row
    last : StepState
        What the step before left.
    moments : Moments
        Of this step's sample.
    kth : int
        The k-th key, or the lower edge of a histogram bin all of whose elements were selected.
    used : KeyInterval
        The last interval of the step.
    inside, equal : int
        Elements in it, and those of them at its tie key.

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
    # Zeros, which are counted in any case, say nothing of how dense other elements are.
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
    """Half the width of an interval for each element inside; of one that is all there is, a guess."""
    width = fma(abs(value), EPSILON[row.dtype], F(used.high - used.low))
    if width < value_of(KEY_MOST_FINITE):
        return F(F(F(0.5) * width) * reciprocal(F(max(inside, 1))))
    return F(UNKNOWN_DENSITY * abs(value))


def _packed(z_error: np.float32, value_error: np.float32, by_value: bool) -> int:
    """Two errors, cut to the upper halves of their 32 bits, and the predictor to go by."""
    z_bits, value_bits = (int(np.array([x], np.float32).view(np.uint32)[0]) for x in (z_error, value_error))
    return (((z_bits & 0xFFFF0000) | value_bits >> 16) & ~1) | int(by_value)
