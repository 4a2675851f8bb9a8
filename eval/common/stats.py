"""Intervals for means and for the difference of two means, from few repetitions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import norm, t

Basis = Literal["welch", "pooled", "assumed"]

_RANGE_OVER_SD = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847, 9: 2.970, 10: 3.078}
"""Expected range of n normal values in standard deviations (the d2 of control charts)."""


@dataclass(frozen=True)
class Interval:
    """A point estimate with the ends of its interval; NaN ends where one value gives no interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def as_json(self) -> dict[str, float | None]:
        """The fields, with None in place of NaN, which JSON does not have."""
        fields = {"value": self.value, "low": self.low, "high": self.high}
        return {name: None if math.isnan(field) else field for name, field in fields.items()}


def sd_from_range(low: float, high: float, runs: int) -> float:
    """Estimate a standard deviation from the published range of `runs` values.

    Raises
    ------
    ValueError
        `runs` outside 2 to 10, or `high` below `low`.
    """
    if runs not in _RANGE_OVER_SD:
        raise ValueError(f"runs: wanted 2 to 10, got {runs}")
    if high < low:
        raise ValueError(f"high: wanted at least low ({low}), got {high}")
    return (high - low) / _RANGE_OVER_SD[runs]


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean with its two-sided Student interval.

    Raises
    ------
    ValueError
        No values.
    """
    if not values:
        raise ValueError("values: wanted at least one, got none")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    half = _t_quantile(confidence, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def difference_interval(
    first: Sequence[float],
    second: Sequence[float],
    *,
    confidence: float = 0.95,
    assumed_sd: float | None = None,
) -> tuple[Interval, Basis | None]:
    """``mean(second) - mean(first)`` with a two-sided interval.

    Parameters
    ----------
    first, second : sequence of float
        Values of independent runs.
    confidence : float
        Two-sided level.
    assumed_sd : float, optional
        Standard deviation of one run, used where neither side has two runs.

    Returns
    -------
    interval : Interval
    basis : str or None
        ``welch``: both sides have two runs or more; variances are not taken as equal.
        ``pooled``: one side has a single run; the variance of the other side is used for both.
        ``assumed``: one run each; normal interval with `assumed_sd`.
        None: one run each and no `assumed_sd`; the interval has NaN ends.
    """
    if not first or not second:
        raise ValueError("first, second: wanted at least one value each, got none")
    delta = statistics.fmean(second) - statistics.fmean(first)
    n1, n2 = len(first), len(second)
    if n1 == 1 and n2 == 1:
        if assumed_sd is None:
            return Interval(delta, math.nan, math.nan), None
        half = float(norm.ppf(0.5 + confidence / 2)) * assumed_sd * math.sqrt(2)
        return Interval(delta, delta - half, delta + half), "assumed"
    if n1 == 1 or n2 == 1:
        several = first if n1 > 1 else second
        scale = statistics.stdev(several) * math.sqrt(1 / n1 + 1 / n2)
        half = _t_quantile(confidence, len(several) - 1) * scale
        return Interval(delta, delta - half, delta + half), "pooled"
    part1, part2 = statistics.variance(first) / n1, statistics.variance(second) / n2
    total = part1 + part2
    if total == 0:  # identical repetitions on both sides: the difference is exact
        return Interval(delta, delta, delta), "welch"
    freedom = total**2 / (part1**2 / (n1 - 1) + part2**2 / (n2 - 1))
    half = _t_quantile(confidence, freedom) * math.sqrt(total)
    return Interval(delta, delta - half, delta + half), "welch"


def reduction_interval(
    baseline: Sequence[float], candidate: Sequence[float], confidence: float = 0.95
) -> Interval:
    """Relative reduction ``1 - mean(candidate) / mean(baseline)`` with its interval.

    The interval is Welch's on the logarithms, so that it is one of a ratio. The values are positive and
    spread by a few per cent at most, where the ratio of means and the geometric one agree.

    Raises
    ------
    ValueError
        Empty input or a value that is not positive.
    """
    for name, values in (("baseline", baseline), ("candidate", candidate)):
        if not values or min(values) <= 0:
            raise ValueError(f"{name}: wanted positive values, got {list(values)}")
    logs, _ = difference_interval(
        [math.log(value) for value in baseline],
        [math.log(value) for value in candidate],
        confidence=confidence,
    )
    value = 1 - statistics.fmean(candidate) / statistics.fmean(baseline)
    return Interval(value, 1 - math.exp(logs.high), 1 - math.exp(logs.low))


def _t_quantile(confidence: float, freedom: float) -> float:
    return float(t.ppf(0.5 + confidence / 2, freedom))
