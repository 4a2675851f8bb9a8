"""Decide from runs of two variants that took turns, however often one looks and adds runs.

The difference comes from a least-squares fit of level, linear drift over the order of the runs, and
variant, and is tested by Welch's t. A verdict may change only at the repetition counts of `LOOKS`, each of
which spends a share of the error rate (a Bonferroni split); `holm` adjusts for many tasks. docs/verdicts.md
says why, and what that is worth.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

Variant = Literal["off", "on"]
Runs = tuple[Sequence[float], Sequence[float]]
"""Figures of the runs off and on, in the order of their repetitions."""

ERROR_RATE = 0.05
"""Chance of any false verdict of a kind in a whole campaign: over all tasks, and however often runs are
added. It holds for "within" and for "regression" separately, and for "faster" and "slower" together."""

LOOKS = {6: 0.08, 8: 0.55, 12: 0.08, 16: 0.08, 32: 0.05}
"""Repetitions of each variant at which a verdict may change, and the share of the error rate spent there.

Most of it at 8, the default, where four tasks without an effect pass in 9 of 10 campaigns at the paper's
spread. The look before it is for large effects; one at 4 would rest on two degrees of freedom for each
variant. The shares add up to 0.84: Welch's approximation errs by up to a tenth where one variant has three to
five times the spread of the other."""

LEAST_REPETITIONS = 3
"""Fewest repetitions that the fit can be made of: each variant has a level, a drift and a variance."""


def variant_order(repetitions: int) -> list[tuple[int, Variant]]:
    """Sequence of (repetition from 1, variant): off on, on off, off on, and so on.

    Turning every second pair round keeps variant and drift (nearly) orthogonal.
    """
    pair: tuple[Variant, Variant] = ("off", "on")
    return [
        (repetition, variant)
        for repetition in range(1, repetitions + 1)
        for variant in (pair if repetition % 2 else pair[::-1])
    ]


@dataclass(frozen=True)
class Look:
    """The difference ``on - off`` after some repetitions."""

    repetitions: int
    difference: float
    error: float  # the standard error
    freedom: float  # its degrees of freedom: from those of the noisier variant to those of both


def drift_free_difference(off: Sequence[float], on: Sequence[float], resolution: float = 0.0) -> Look:
    """Fit level, linear drift over the order of the runs, and variant.

    There are at least `LEAST_REPETITIONS` runs of each variant, rounded to a step of `resolution`. The
    standard deviation of a run is taken to be at least that of rounding, so that values which happen to be
    printed alike do not pass for exact ones.
    """
    repetitions = len(off)
    is_on = np.array([variant == "on" for _, variant in variant_order(repetitions)])
    values = np.empty(2 * repetitions)
    values[~is_on], values[is_on] = off, on
    position = np.arange(2 * repetitions)
    course = np.column_stack([np.ones(2 * repetitions), position - position.mean()])
    weights = np.linalg.pinv(np.column_stack([course, is_on]))[-1]
    # The estimate is a function of the level and the drift of each variant's own fit, so that the residuals
    # of these fits are independent of it.
    freedom = repetitions - course.shape[1]
    parts = [
        float((weights[side] ** 2).sum()) * max(_variance(values[side], course[side]), resolution**2 / 12)
        for side in (~is_on, is_on)
    ]
    squares = sum(part**2 for part in parts)
    welch = freedom * sum(parts) ** 2 / squares if squares else 2.0 * freedom
    return Look(repetitions, float(values @ weights), math.sqrt(sum(parts)), welch)


def _variance(values: npt.NDArray[np.float64], design: npt.NDArray[np.float64]) -> float:
    """Variance of runs around a fit."""
    fitted = design @ (np.linalg.pinv(design) @ values)
    return float(((values - fitted) ** 2).sum()) / (len(design) - design.shape[1])


def looks_at(off: Sequence[float], on: Sequence[float], resolution: float = 0.0) -> list[Look]:
    """Every look that these runs have passed; each is of the first repetitions, and so never changes."""
    return [
        drift_free_difference(off[:count], on[:count], resolution) for count in LOOKS if count <= len(off)
    ]


def next_look(repetitions: int) -> int | None:
    """The next repetition count at which a verdict may change; None behind the last one."""
    return min((count for count in LOOKS if count > repetitions), default=None)


def p_above(looks: Sequence[Look], bound: float) -> float:
    """Anytime-valid p-value of ``difference <= bound``: small where the difference lies above.

    The chance that it ever falls to an error rate where that is true is at most the error rate.
    """
    smallest = 1.0
    for look in looks:
        gap = look.difference - bound
        # Exact runs are infinitely far from every bound but their own.
        distance = gap / look.error if look.error else math.copysign(math.inf, gap) if gap else 0.0
        smallest = min(smallest, float(student.sf(distance, look.freedom)) / LOOKS[look.repetitions])
    return smallest


def p_below(looks: Sequence[Look], bound: float) -> float:
    """Anytime-valid p-value of ``difference >= bound``: small where the difference lies below."""
    return p_above([replace(look, difference=-look.difference) for look in looks], -bound)


def bounds(looks: Sequence[Look], error_rate: float) -> tuple[float, float]:
    """Ends that hold at all looks together, each with this one-sided error rate; at first infinite."""
    low, high = -math.inf, math.inf
    for look in looks:
        half = float(student.isf(error_rate * LOOKS[look.repetitions], look.freedom)) * look.error
        low, high = max(low, look.difference - half), min(high, look.difference + half)
    return low, high


def holm(p: Sequence[float], family: int) -> list[float]:
    """Holm's adjusted p-values of some of the `family` hypotheses of a campaign.

    Rejecting where they are at most an error rate keeps the chance of any false rejection below it, whatever
    the dependence.
    """
    adjusted, largest = [1.0] * len(p), 0.0
    for place, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (family - place) * p[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Decision:
    """Outcome for one task or case, in the unit of its runs."""

    verdict: str  # within, regression or inconclusive where there is a margin; else faster, slower or open
    repetitions: int  # runs of each variant
    difference: float | None  # on - off, a linear drift removed once there are runs enough to fit it
    low: float | None  # ends of its interval, with the error rate of this task's share; none before a look
    high: float | None
    margin: float | None  # largest loss that is accepted
    p_good: float  # adjusted for the looks and the tasks; the verdict compares them with the error rate
    p_bad: float


def decide(
    runs: Sequence[Runs], family: int, margins: Sequence[float] | None = None, resolution: float = 0.0
) -> list[Decision]:
    """Judge tasks or cases of a campaign together, which has `family` of them.

    Of each task there are scores, of which more is better, and a margin, the largest loss that is accepted:
    the good claim is that the loss is smaller, the bad one that it is larger. Or of each case there are the
    logarithms of times, and no margins: the claims are faster and slower. These share one error rate, so that
    each p-value is doubled. Looks that contradict each other show nothing.
    """
    looks = [looks_at(off, on, resolution) for off, on in runs]
    if margins is None:
        names, sides = ("faster", "slower", "open"), 2
        faster, slower = ([p(case, 0.0) for case in looks] for p in (p_below, p_above))
        either = holm([min(1.0, 2 * min(pair)) for pair in zip(faster, slower, strict=True)], family)
        claims = [(p, 1.0) if a < b else (1.0, p) for p, a, b in zip(either, faster, slower, strict=True)]
    else:
        names, sides = ("within", "regression", "inconclusive"), 1
        good, bad = (
            holm([p(task, -margin) for task, margin in zip(looks, margins, strict=True)], family)
            for p in (p_above, p_below)
        )
        claims = list(zip(good, bad, strict=True))
    decisions = []
    for index, ((off, on), (p_good, p_bad)) in enumerate(zip(runs, claims, strict=True)):
        difference = statistics.fmean(on) - statistics.fmean(off) if off else None
        if len(off) >= LEAST_REPETITIONS:
            difference = drift_free_difference(off, on, resolution).difference
        low, high = bounds(looks[index], ERROR_RATE / family / sides)
        shown = 0 if p_good <= ERROR_RATE < p_bad else 1 if p_bad <= ERROR_RATE < p_good else 2
        decisions.append(
            Decision(
                verdict=names[shown],
                repetitions=len(off),
                difference=difference,
                low=low if looks[index] else None,
                high=high if looks[index] else None,
                margin=None if margins is None else margins[index],
                p_good=p_good,
                p_bad=p_bad,
            )
        )
    return decisions
