"""Statements about a difference of two variants that stay true when runs are added until one is happy.

Three things would otherwise make a stated error rate false, and each is dealt with here:

* **Drift.** A machine that warms up favours whoever runs first. The difference comes from a least-squares
  fit of level, linear drift and variant, so that a linear drift cancels at every repetition count and in
  every order of the runs, not only where the order happens to be balanced.
* **Optional stopping.** The run store invites adding runs until the answer pleases. An answer may change
  only at the repetition counts of `LOOKS`; each has a fixed share of the error rate, and the shares add up
  to 1 (a Bonferroni split over the looks, the simplest form of alpha spending). So the error rate holds
  for whoever stops at any time for any reason, also without a plan.
* **Many tasks.** `holm` adjusts the p-values of all tasks or cases together.

At each look the test is Student's, exact for normal errors of equal variance; the two bounds (over looks
and over tasks) hold under any dependence. ``eval/simulate_verdicts.py`` checks all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from eval.common.order import Order, variant_order

LOOKS = {4: 0.10, 6: 0.15, 8: 0.50, 12: 0.10, 16: 0.10, 32: 0.05}
"""Repetitions of each variant at which a verdict may change, and the share of the error rate spent there.

Half of it at 8, the default, where four tasks without an effect pass in 9 of 10 campaigns at the paper's
spread. The looks before it are for large effects. A campaign that is open after 32 stays open: what it is
looking for is smaller than what such runs can show."""

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
    freedom : int
        Degrees of freedom of the standard error.
    unit_error : float
        The standard error that runs of standard deviation 1 have.
    """

    repetitions: int
    difference: Floats
    error: Floats
    freedom: int
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
        Values of the runs in the order of their repetitions; n at least 2.
    order : str
        In which order the runs took turns, as for `eval.common.order.variant_order`.
    resolution : float
        Step to which the values are rounded. The standard deviation of a run is taken to be at least that
        of rounding, so that values which happen to be printed alike do not pass for exact ones.

    Returns
    -------
    Look

    Raises
    ------
    ValueError
        Fewer than two repetitions, or sides of different length.
    """
    first, second = np.asarray(off, dtype=np.float64), np.asarray(on, dtype=np.float64)
    if first.shape != second.shape or first.shape[-1] < 2:
        raise ValueError(
            f"off, on: wanted as many runs of each, at least 2, got {first.shape[-1]} and {second.shape[-1]}"
        )
    repetitions = first.shape[-1]
    sequence = variant_order(repetitions, order)
    values = np.empty((*first.shape[:-1], 2 * repetitions))
    is_on = np.array([variant == "on" for _, variant in sequence])
    values[..., ~is_on], values[..., is_on] = first, second
    position = np.arange(2 * repetitions)
    design = np.column_stack([np.ones(2 * repetitions), position - position.mean(), is_on])
    fit = np.linalg.pinv(design)
    coefficients = values @ fit.T
    freedom = 2 * repetitions - design.shape[1]
    variance = ((values - coefficients @ design.T) ** 2).sum(axis=-1) / freedom
    variance = np.maximum(variance, resolution**2 / 12)
    unit_error = math.sqrt((fit[2] ** 2).sum())
    return Look(repetitions, coefficients[..., 2], np.sqrt(variance) * unit_error, freedom, unit_error)


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
