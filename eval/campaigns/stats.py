"""Small statistics that more than one evaluation shares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_RANGE_OVER_SD = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847, 9: 2.970, 10: 3.078}
"""Expected range of n normal values in standard deviations (the d2 of control charts)."""


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


def relative_sd(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation of one run relative to its mean, pooled over groups of repetitions.

    Parameters
    ----------
    groups : sequence of sequences of float
        Positive values; each group has two or more runs of one configuration.
    """
    logs = [[math.log(value) for value in group] for group in groups]
    freedom = sum(len(group) - 1 for group in logs)
    return math.sqrt(sum(statistics.variance(group) * (len(group) - 1) for group in logs) / freedom)
