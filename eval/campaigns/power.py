"""What a campaign can show, said before its first run.

The figures rest on an assumed spread from run to run, for which the scripts take the paper's. They are for
the looks of `eval.campaigns.sequential` and the rules of `eval.campaigns.verdicts`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student

from eval.campaigns.order import Order
from eval.campaigns.sequential import LOOKS, Floats, drift_free_difference, looks_at
from eval.campaigns.verdicts import judge_noninferiority

POWER = 0.9
"""Share of campaigns in which an effect of the stated size is found."""

CAMPAIGNS = 2000
"""Simulated campaigns behind a stated pass rate: a standard error below one per cent."""


def last_look(repetitions: int) -> int | None:
    """The last look that so many repetitions reach; None before the first."""
    return max((count for count in LOOKS if count <= repetitions), default=None)


def detectable_difference(sd: float, repetitions: int, order: Order, error_rate: float) -> float | None:
    """Distance from a bound that is shown in `POWER` of all campaigns.

    A lower bound of what the rule can do: it counts the last look alone, and the error rate that Holm
    leaves to the least favoured of the tasks.

    Parameters
    ----------
    sd : float
        Standard deviation of one run.
    repetitions : int
        Runs of each variant.
    order : str
    error_rate : float
        One-sided, of one task.

    Returns
    -------
    float or None
        None before the first look.
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
    for count in LOOKS:
        shown = detectable_difference(sd, count, order, error_rate)
        if shown is not None and shown <= difference:
            return count
    return None


@cache
def pass_rate(
    sds: tuple[float, ...],
    margins: tuple[float, ...],
    repetitions: int,
    order: Order,
    family: int | None = None,
) -> float:
    """Share of campaigns without any effect in which every task comes out within its margin.

    Simulated with normal runs and a fixed seed, through the rule itself; parameters as for
    `detectable_difference` and `eval.campaigns.verdicts.judge_noninferiority`.
    """
    rng = np.random.default_rng(21)
    looks = [looks_at(*_runs(rng, sd, repetitions), order) for sd in sds]
    return float(judge_noninferiority(looks, margins, family).good.all(axis=-1).mean()) if looks[0] else 0.0


def _runs(rng: np.random.Generator, sd: float, repetitions: int) -> tuple[Floats, Floats]:
    off, on = rng.normal(0.0, sd, (2, CAMPAIGNS, repetitions))
    return off, on
