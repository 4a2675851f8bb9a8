"""Statements about a difference of two variants that stay true when runs are added until one is happy.

Four things would otherwise make a stated error rate false, and each is dealt with here:

* **Drift.** A machine that warms up favours whoever runs first. The difference comes from a least-squares
  fit of level, linear drift and variant, so that a linear drift cancels at every repetition count and in
  every order of the runs, not only where the order happens to be balanced. A warm-up that fades counts as
  noise: it makes no false verdict and may hide a difference. `warm_up_p` finds it, so that reports say it.
* **Unequal spread.** One variant may be noisier than the other. Each has its own variance, from a fit of its
  runs alone, and the degrees of freedom are those of Welch and Satterthwaite.
* **Optional stopping.** The run store invites adding runs until the answer pleases. An answer may change
  only at the repetition counts of `LOOKS`; each has a fixed share of the error rate, and the shares add up
  to less than 1 (a Bonferroni split over the looks, the simplest form of alpha spending). So the error rate
  holds for whoever stops at any time for any reason, also without a plan.
* **Many tasks.** `holm` adjusts the p-values of all tasks or cases together.

The two bounds (over looks and over tasks) hold under any dependence. Welch's test is an approximation, whose
error at the far tail is what the rest of the shares is kept for. `eval.campaigns.simulate_verdicts` checks
all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from eval.campaigns.order import Order, variant_order

LOOKS = {6: 0.08, 8: 0.55, 12: 0.08, 16: 0.08, 32: 0.05}
"""Repetitions of each variant at which a verdict may change, and the share of the error rate spent there.

Most of it at 8, the default, where four tasks without an effect pass in 9 of 10 campaigns at the paper's
spread. The look before it is for large effects; one at 4 would rest on two degrees of freedom for each
variant. The shares add up to 0.84: Welch's approximation errs by up to a tenth where one variant has three to
five times the spread of the other. A campaign that is open after 32 stays open: what it is looking for is
smaller than what such runs can show."""

LEAST_REPETITIONS = 3
"""Fewest repetitions that the fit can be made of: each variant has a level, a drift and a variance."""

WARM_UP_RATE = 0.01
"""Rate of wrong remarks about a warm-up where both variants are equally noisy. It is up to five times as high
where one is five times as noisy as the other: a remark is no verdict."""

WARM_UP_REMARK = (
    "the first runs differ from the later ones, as of a machine that warms up. To the verdict that is "
    "noise, which may hide a difference: keep the machine busy before the first run, and start over in "
    "another folder."
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """The difference ``on - off`` after some repetitions.

    Attributes
    ----------
    repetitions : int
        Runs of each variant that it rests on.
    difference, error : ndarray, any shape
        Estimate and its standard error; an axis for every axis of the values but the last.
    freedom : ndarray
        Degrees of freedom of the standard error, by Welch and Satterthwaite: from those of the noisier
        variant to those of both.
    unit_error : float
        The standard error that runs of standard deviation 1 have.
    """

    repetitions: int
    difference: Floats
    error: Floats
    freedom: Floats
    unit_error: float

    @property
    def share(self) -> float:
        """Share of the error rate that is spent here; 0 where no verdict may change."""
        return LOOKS.get(self.repetitions, 0.0)


def drift_free_difference(
    off: npt.ArrayLike, on: npt.ArrayLike, order: Order, resolution: float = 0.0
) -> Look:
    """Fit level, linear drift over the order of the runs, and variant.

    Parameters
    ----------
    off, on : array_like, shape [..., n]
        Values of the runs in the order of their repetitions; n at least `LEAST_REPETITIONS`.
    order : str
        In which order the runs took turns, as for `eval.campaigns.order.variant_order`.
    resolution : float
        Step to which the values are rounded. The standard deviation of a run is taken to be at least that
        of rounding, so that values which happen to be printed alike do not pass for exact ones.

    Returns
    -------
    Look

    Raises
    ------
    ValueError
        Fewer than `LEAST_REPETITIONS`, or sides of different length.
    """
    first, second = np.asarray(off, dtype=np.float64), np.asarray(on, dtype=np.float64)
    repetitions = first.shape[-1]
    if first.shape != second.shape or repetitions < LEAST_REPETITIONS:
        raise ValueError(
            f"off, on: wanted as many runs of each, at least {LEAST_REPETITIONS}, "
            f"got {repetitions} and {second.shape[-1]}"
        )
    values, is_on = _in_sequence(first, second, order)
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


def warm_up_p(off: npt.ArrayLike, on: npt.ArrayLike, order: Order, resolution: float = 0.0) -> Floats:
    """P-value of runs without a warm-up: small where a fading one is there beside the linear drift.

    Student's test of a term that fades as one over the number of the run, beside those of
    `drift_free_difference`, whose parameters these are. It is 1 below `LEAST_REPETITIONS`.
    """
    first, second = np.asarray(off, dtype=np.float64), np.asarray(on, dtype=np.float64)
    if first.shape[-1] < LEAST_REPETITIONS:
        return np.ones(first.shape[:-1])
    values, is_on = _in_sequence(first, second, order)
    position = np.arange(values.shape[-1])
    design = np.column_stack([np.ones(position.size), position, is_on, 1 / (1 + position)])
    fit = np.linalg.pinv(design)
    variance = np.maximum(_variance(values, design), resolution**2 / 12)
    error = np.sqrt(variance * (fit[-1] ** 2).sum())
    distance = np.divide(np.abs(values @ fit[-1]), error, out=np.zeros(error.shape), where=error > 0)
    return np.asarray(2 * student.sf(distance, position.size - design.shape[1]))


def _in_sequence(off: Floats, on: Floats, order: Order) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the runs of both variants in the order in which they ran, and which of them are "on"."""
    sequence = variant_order(off.shape[-1], order)
    is_on = np.array([variant == "on" for _, variant in sequence])
    values = np.empty((*off.shape[:-1], len(sequence)))
    values[..., ~is_on], values[..., is_on] = off, on
    return values, is_on


def _variance(values: Floats, design: Floats) -> Floats:
    """Variance of runs around a fit, along the last axis."""
    fitted = values @ np.linalg.pinv(design).T @ design.T
    return np.asarray(((values - fitted) ** 2).sum(axis=-1) / (len(design) - design.shape[1]))


def looks_at(off: npt.ArrayLike, on: npt.ArrayLike, order: Order, resolution: float = 0.0) -> list[Look]:
    """Every look that this many repetitions have passed; parameters as for `drift_free_difference`.

    Each look uses the first repetitions only, so that later runs never change an earlier look.
    """
    first, second = np.asarray(off, dtype=np.float64), np.asarray(on, dtype=np.float64)
    return [
        drift_free_difference(first[..., :count], second[..., :count], order, resolution)
        for count in LOOKS
        if count <= min(first.shape[-1], second.shape[-1])
    ]


def next_look(repetitions: int) -> int | None:
    """The next repetition count at which a verdict may change; None behind the last one."""
    return min((count for count in LOOKS if count > repetitions), default=None)


def p_above(looks: Sequence[Look], bound: npt.ArrayLike) -> Floats:
    """Anytime-valid p-value of ``difference <= bound``: small where the difference lies above.

    It may be compared with an error rate after every look; the chance that it is ever at or below a true
    hypothesis' error rate is that error rate. Without a look it is 1.
    """
    smallest = np.ones(np.shape(bound))
    for look in looks:
        p = student.sf(_distance(look, bound), look.freedom) / look.share
        smallest = np.minimum(smallest, p)
    return np.asarray(smallest)


def p_below(looks: Sequence[Look], bound: npt.ArrayLike) -> Floats:
    """Anytime-valid p-value of ``difference >= bound``: small where the difference lies below."""
    mirrored = [replace(look, difference=-look.difference) for look in looks]
    return p_above(mirrored, -np.asarray(bound, dtype=np.float64))


def bounds(looks: Sequence[Look], error_rate: float) -> tuple[Floats, Floats]:
    """Confidence sequence: ends that hold at all looks together, each with this one-sided error rate.

    Returns
    -------
    low, high : ndarray
        Infinite before the first look.
    """
    low, high = np.array(-math.inf), np.array(math.inf)
    for look in looks:
        half = student.isf(error_rate * look.share, look.freedom) * look.error
        low, high = np.maximum(low, look.difference - half), np.minimum(high, look.difference + half)
    return low, high


def holm(p: npt.ArrayLike, family: int | None = None) -> Floats:
    """Holm's adjusted p-values, along the last axis.

    Rejecting where they are at most an error rate keeps the chance of any false rejection below it,
    whatever the dependence.

    Parameters
    ----------
    p : array_like, shape [..., m]
    family : int, optional
        Hypotheses in the family, at least m, where some of them are not judged now.
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


def _distance(look: Look, bound: npt.ArrayLike) -> Floats:
    """Student's statistic; a standard error of 0 makes it infinite, or 0 on the bound itself."""
    gap = np.asarray(look.difference - np.asarray(bound, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gap == 0, 0.0, gap / look.error)
