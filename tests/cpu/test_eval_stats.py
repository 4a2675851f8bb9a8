"""Spreads are estimated as their definitions say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.campaigns.stats import relative_sd, sd_from_range


def test_spread_from_a_range() -> None:
    rng = np.random.default_rng(3)
    sample = rng.normal(0, 2, (20_000, 4))
    estimates = [sd_from_range(low, high, 4) for low, high in zip(sample.min(1), sample.max(1), strict=True)]
    assert np.mean(estimates) == pytest.approx(2, rel=0.02)
    with pytest.raises(ValueError, match="runs: wanted 2 to 10, got 1"):
        sd_from_range(0, 1, 1)
    with pytest.raises(ValueError, match="high: wanted at least low"):
        sd_from_range(1, 0, 4)


def test_relative_spread_is_pooled_by_degrees_of_freedom() -> None:
    first, second = [1.0, 2.0], [5.0, 5.0, 5.0]
    variance = np.var(np.log(first), ddof=1)
    assert relative_sd([first, second]) == pytest.approx(math.sqrt(variance / 3))
    assert relative_sd([[10.0, 10.1, 9.9]]) == pytest.approx(0.01, rel=0.01)
