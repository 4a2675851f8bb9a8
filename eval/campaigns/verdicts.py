"""Decide from runs of two variants that took turns, however often one looks and adds runs.

The difference comes from a least-squares fit of level, linear drift over the order of the runs, and
variant, and is tested by Welch's t. A verdict may change only at the repetition counts of `LOOKS`, each of
which spends a share of the error rate (a Bonferroni split); `holm` adjusts for many tasks. docs/verdicts.md
says why, and what that is worth. Arrays may have any leading axes, so that one campaign and the thousands
that a test simulates go through the same lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student

from eval.common.tables import markdown_table

Variant = Literal["off", "on"]
Order = Literal["abba", "alternate"]
Floats = npt.NDArray[np.float64]
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

POWER = 0.9
"""Share of campaigns in which an effect of the stated size is found."""


def variant_order(repetitions: int, order: Order) -> list[tuple[int, Variant]]:
    """Sequence of (repetition from 1, variant).

    ``alternate`` is off on, off on, ... as in the paper. ``abba`` turns every second pair round, which keeps
    variant and drift (nearly) orthogonal.
    """
    pair: tuple[Variant, Variant] = ("off", "on")
    return [
        (repetition, variant)
        for repetition in range(1, repetitions + 1)
        for variant in (pair[::-1] if order == "abba" and repetition % 2 == 0 else pair)
    ]


@dataclass(frozen=True)
class Look:
    """The difference ``on - off`` after some repetitions.

    Arrays have an axis for every axis of the values but the last.
    """

    repetitions: int
    difference: Floats
    error: Floats  # the standard error
    freedom: Floats  # its degrees of freedom: from those of the noisier variant to those of both
    unit_error: float  # the standard error that runs of standard deviation 1 have


def drift_free_difference(
    off: npt.ArrayLike, on: npt.ArrayLike, order: Order, resolution: float = 0.0
) -> Look:
    """Fit level, linear drift over the order of the runs, and variant.

    Values of the runs, ``[..., n]``, are in the order of their repetitions, of which there are at least
    `LEAST_REPETITIONS`, and are rounded to a step of `resolution`. The standard deviation of a run is taken
    to be at least that of rounding, so that values which happen to be printed alike do not pass for exact
    ones.
    """
    first, second = np.asarray(off, dtype=np.float64), np.asarray(on, dtype=np.float64)
    repetitions = first.shape[-1]
    if first.shape != second.shape or repetitions < LEAST_REPETITIONS:
        raise ValueError(
            f"off, on: wanted as many runs of each, at least {LEAST_REPETITIONS}, "
            f"got {repetitions} and {second.shape[-1]}"
        )
    is_on = np.array([variant == "on" for _, variant in variant_order(repetitions, order)])
    values = np.empty((*first.shape[:-1], 2 * repetitions))
    values[..., ~is_on], values[..., is_on] = first, second
    position = np.arange(2 * repetitions)
    course = np.column_stack([np.ones(2 * repetitions), position - position.mean()])
    weights = np.linalg.pinv(np.column_stack([course, is_on]))[-1]
    # The estimate is a function of the level and the drift of each variant's own fit, so that the residuals
    # of these fits are independent of it.
    freedom = repetitions - course.shape[1]
    parts = [
        (weights[side] ** 2).sum()
        * np.maximum(_variance(values[..., side], course[side]), resolution**2 / 12)
        for side in (~is_on, is_on)
    ]
    total = np.asarray(parts[0] + parts[1])
    squares = np.asarray(parts[0] ** 2 + parts[1] ** 2)
    welch = np.full(total.shape, 2.0 * freedom)
    np.divide(freedom * total**2, squares, out=welch, where=squares > 0)
    unit_error = math.sqrt((weights**2).sum())
    return Look(repetitions, np.asarray(values @ weights), np.sqrt(total), welch, unit_error)


def _variance(values: Floats, design: Floats) -> Floats:
    """Variance of runs around a fit, along the last axis."""
    fitted = values @ np.linalg.pinv(design).T @ design.T
    return np.asarray(((values - fitted) ** 2).sum(axis=-1) / (len(design) - design.shape[1]))


def looks_at(off: npt.ArrayLike, on: npt.ArrayLike, order: Order, resolution: float = 0.0) -> list[Look]:
    """Every look that these runs have passed; each is of the first repetitions, and so never changes."""
    first, second = np.asarray(off, dtype=np.float64), np.asarray(on, dtype=np.float64)
    return [
        drift_free_difference(first[..., :count], second[..., :count], order, resolution)
        for count in LOOKS
        if count <= min(first.shape[-1], second.shape[-1])
    ]


def last_look(repetitions: int) -> int | None:
    """The last look that so many repetitions reach; None before the first."""
    return max((count for count in LOOKS if count <= repetitions), default=None)


def next_look(repetitions: int) -> int | None:
    """The next repetition count at which a verdict may change; None behind the last one."""
    return min((count for count in LOOKS if count > repetitions), default=None)


def p_above(looks: Sequence[Look], bound: float) -> Floats:
    """Anytime-valid p-value of ``difference <= bound``: small where the difference lies above.

    The chance that it ever falls to an error rate where that is true is at most the error rate.
    """
    smallest = np.ones(looks[0].difference.shape if looks else ())
    for look in looks:
        gap = np.asarray(look.difference - bound)
        with np.errstate(divide="ignore", invalid="ignore"):  # exact runs: infinite, or 0 on the bound itself
            distance = np.where(gap == 0, 0.0, gap / look.error)
        smallest = np.minimum(smallest, student.sf(distance, look.freedom) / LOOKS[look.repetitions])
    return np.asarray(smallest)


def p_below(looks: Sequence[Look], bound: float) -> Floats:
    """Anytime-valid p-value of ``difference >= bound``: small where the difference lies below."""
    return p_above([replace(look, difference=-look.difference) for look in looks], -bound)


def bounds(looks: Sequence[Look], error_rate: float) -> tuple[Floats, Floats]:
    """Ends that hold at all looks together, each with this one-sided error rate; at first infinite."""
    low, high = np.array(-math.inf), np.array(math.inf)
    for look in looks:
        half = student.isf(error_rate * LOOKS[look.repetitions], look.freedom) * look.error
        low, high = np.maximum(low, look.difference - half), np.minimum(high, look.difference + half)
    return low, high


def holm(p: npt.ArrayLike, family: int | None = None) -> Floats:
    """Holm's adjusted p-values, along the last axis.

    Rejecting where they are at most an error rate keeps the chance of any false rejection below it, whatever
    the dependence. `family` counts the hypotheses, where some of them are not judged now.
    """
    values = np.asarray(p, dtype=np.float64)
    count = values.shape[-1]
    size = count if family is None else family
    if size < count:
        raise ValueError(f"family: wanted at least the {count} hypotheses given, got {size}")
    order = np.argsort(values, axis=-1, kind="stable")
    factors = size - np.arange(count)
    stepped = np.maximum.accumulate(np.take_along_axis(values, order, axis=-1) * factors, axis=-1)
    adjusted = np.empty_like(values)
    np.put_along_axis(adjusted, order, np.minimum(stepped, 1.0), axis=-1)
    return adjusted


@dataclass(frozen=True)
class Judgement:
    """Adjusted p-values of two opposite claims about each task or case, the last axis of both arrays."""

    p_good: Floats
    p_bad: Floats

    @property
    def good(self) -> npt.NDArray[np.bool_]:
        """Where the good claim is shown. Looks that contradict each other show nothing."""
        return np.asarray((self.p_good <= ERROR_RATE) & (self.p_bad > ERROR_RATE))

    @property
    def bad(self) -> npt.NDArray[np.bool_]:
        """Where the bad claim is shown."""
        return np.asarray((self.p_bad <= ERROR_RATE) & (self.p_good > ERROR_RATE))


def judge_noninferiority(
    looks: Sequence[Sequence[Look]], margins: Sequence[float], family: int | None = None
) -> Judgement:
    """Judge whether the loss of each task is smaller than its margin (the good claim) or larger.

    `looks` are of scores of which more is better, `margins` the largest losses that are accepted, and
    `family` counts the tasks of the campaign, where not all are judged now.
    """
    for margin in margins:
        if not margin > 0:
            raise ValueError(f"margin: wanted a positive number, got {margin}")
    within = [p_above(task, -margin) for task, margin in zip(looks, margins, strict=True)]
    regression = [p_below(task, -margin) for task, margin in zip(looks, margins, strict=True)]
    return Judgement(holm(np.stack(within, axis=-1), family), holm(np.stack(regression, axis=-1), family))


def judge_difference(looks: Sequence[Sequence[Look]], family: int | None = None) -> Judgement:
    """Judge whether "on" is faster in each case (the good claim) or slower, from logarithms of times.

    Both claims share one error rate: each p-value is doubled, and Holm's adjustment runs over the cases.
    """
    faster, slower = ([p(case, 0.0) for case in looks] for p in (p_below, p_above))
    either = [np.minimum(1.0, 2 * np.minimum(a, b)) for a, b in zip(faster, slower, strict=True)]
    adjusted = holm(np.stack(either, axis=-1), family)
    is_faster = np.stack([a < b for a, b in zip(faster, slower, strict=True)], axis=-1)
    return Judgement(np.where(is_faster, adjusted, 1.0), np.where(is_faster, 1.0, adjusted))


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
    sd: float | None  # of one run as measured here, once there are runs enough


def decide(
    runs: Sequence[Runs],
    order: Order,
    family: int | None = None,
    margins: Sequence[float] | None = None,
    resolution: float = 0.0,
) -> list[Decision]:
    """Judge all tasks or cases of a campaign together.

    Of each task there are scores, of which more is better, and a margin, the largest loss that is accepted;
    or of each case the logarithms of times, and no margins: the claims are faster and slower. The other
    arguments are as for `holm` and `drift_free_difference`.
    """
    if not runs:
        return []
    looks = [looks_at(off, on, order, resolution) for off, on in runs]
    size = len(runs) if family is None else family
    if margins is None:
        judgement, names = judge_difference(looks, size), ("faster", "slower", "open")
    else:
        judgement, names = (
            judge_noninferiority(looks, margins, size),
            ("within", "regression", "inconclusive"),
        )
    one_sided = ERROR_RATE / size / (2 if margins is None else 1)
    decisions = []
    for index, (off, on) in enumerate(runs):
        difference = statistics.fmean(on) - statistics.fmean(off) if off else None
        sd = None
        if len(off) >= LEAST_REPETITIONS:
            whole = drift_free_difference(off, on, order, resolution)
            difference, sd = float(whole.difference), float(whole.error) / whole.unit_error
        low, high = bounds(looks[index], one_sided)
        decisions.append(
            Decision(
                verdict=names[0 if judgement.good[index] else 1 if judgement.bad[index] else 2],
                repetitions=len(off),
                difference=difference,
                low=float(low) if looks[index] else None,
                high=float(high) if looks[index] else None,
                margin=None if margins is None else margins[index],
                p_good=float(judgement.p_good[index]),
                p_bad=float(judgement.p_bad[index]),
                sd=sd,
            )
        )
    return decisions


def detectable_difference(sd: float, repetitions: int, order: Order, error_rate: float) -> float | None:
    """Distance from a bound that is shown in `POWER` of all campaigns; None before the first look.

    A lower bound of what the rule can do for runs of standard deviation `sd`: it counts the last look alone,
    and the one-sided error rate that Holm leaves to the least favored of the tasks.
    """
    look = last_look(repetitions)
    if look is None:
        return None
    zeros = np.zeros(look)
    design = drift_free_difference(zeros, zeros, order)
    freedom = float(design.freedom) - 1  # what Welch's estimate of it costs where the spreads are equal
    limit = float(student.isf(error_rate * LOOKS[look], freedom))
    distance = brentq(lambda shift: float(nct.sf(limit, freedom, shift)) - POWER, 0.0, 100.0 + 10 * limit)
    return float(distance) * design.unit_error * sd


def repetitions_needed(sd: float, difference: float, order: Order, error_rate: float) -> int | None:
    """The first look at which `difference` is shown in `POWER` of all campaigns; None if there is none."""
    shown = {count: detectable_difference(sd, count, order, error_rate) or math.inf for count in LOOKS}
    return next((count for count, least in shown.items() if least <= difference), None)


def describe_power(
    spreads: Mapping[str, tuple[float, Sequence[float]]],
    repetitions: int,
    order: Order,
    error_rate: float,
    unit: str,
) -> str:
    """What so many repetitions can show at an assumed spread, said before the first of them.

    `spreads` are by task or case the standard deviation of a run, and distances to show: that of no effect
    from the margin, or differences of times. The others are as for `detectable_difference`.
    """
    rows = []
    for name, (sd, distances) in spreads.items():
        shown = detectable_difference(sd, repetitions, order, error_rate)
        needed = [(repetitions_needed(sd, distance, order, error_rate), distance) for distance in distances]
        counts = [f"{count or f'more than {max(LOOKS)}'} for {distance:.2g}" for count, distance in needed]
        rows.append([name, f"{sd:.2g}", "-" if shown is None else f"{shown:.2g}", "; ".join(counts)])
    headers = ["", "spread of a run (paper)", f"shown by {repetitions}", "repetitions needed"]
    return (
        f"Power at the paper's spread, {unit}: distances from the bound (the margin, or no difference) that\n"
        f"are shown in {100 * POWER:.0f} % of campaigns. Chance of any false verdict of a kind: at most "
        f"{100 * ERROR_RATE:.0f} %, even if\nruns are added.\n{markdown_table(headers, rows)}"
    )
