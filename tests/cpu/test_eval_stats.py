"""Intervals agree with scipy where it has them, and cover as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from eval.common.stats import difference_interval, mean_interval, reduction_interval, sd_from_range
from eval.common.tpot_report import PAPER

FIRST = [10.8161, 10.8509, 10.8785]
SECOND = [10.2708, 10.2367, 10.2593, 10.3]


def test_mean_interval_is_students() -> None:
    got = mean_interval(FIRST, 0.9)
    low, high = stats.t.interval(0.9, 2, loc=np.mean(FIRST), scale=stats.sem(FIRST))
    assert (got.value, got.low, got.high) == pytest.approx((np.mean(FIRST), low, high), rel=1e-12)
    assert got.half_width == pytest.approx((high - low) / 2)


def test_mean_of_one_value_has_no_interval() -> None:
    got = mean_interval([3.0])
    assert got.value == 3.0 and math.isnan(got.low) and math.isnan(got.high)
    assert got.as_json() == {"value": 3.0, "low": None, "high": None}
    with pytest.raises(ValueError, match="values: wanted at least one"):
        mean_interval([])


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_difference_is_welchs(confidence: float) -> None:
    got, basis = difference_interval(FIRST, SECOND, confidence=confidence)
    wanted = stats.ttest_ind(SECOND, FIRST, equal_var=False).confidence_interval(confidence)
    assert basis == "welch"
    assert (got.low, got.high) == pytest.approx((wanted.low, wanted.high), rel=1e-9)
    assert got.value == pytest.approx(np.mean(SECOND) - np.mean(FIRST))


def test_identical_repetitions_give_an_exact_difference() -> None:
    got, basis = difference_interval([2.0, 2.0], [1.5, 1.5, 1.5])
    assert (got.low, got.value, got.high, basis) == (-0.5, -0.5, -0.5, "welch")


@pytest.mark.parametrize("swap", [False, True])
def test_single_run_borrows_the_other_sides_variance(swap: bool) -> None:
    several, single = [1.0, 2.0, 4.0], [3.0]
    got, basis = difference_interval(*((single, several) if swap else (several, single)), confidence=0.9)
    half = stats.t.ppf(0.95, 2) * np.std(several, ddof=1) * math.sqrt(1 + 1 / 3)
    assert basis == "pooled"
    assert got.half_width == pytest.approx(half)
    assert got.value == pytest.approx((1 if not swap else -1) * (3 - 7 / 3))


def test_one_run_each_uses_the_assumed_spread() -> None:
    got, basis = difference_interval([1.0], [2.0], confidence=0.9, assumed_sd=0.5)
    assert basis == "assumed"
    assert got.half_width == pytest.approx(stats.norm.ppf(0.95) * 0.5 * math.sqrt(2))
    got, basis = difference_interval([1.0], [2.0])
    assert basis is None and got.value == 1.0 and math.isnan(got.low)
    with pytest.raises(ValueError, match="at least one value each"):
        difference_interval([], [1.0])


def test_welch_covers_the_true_difference_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    runs = 600
    hits = 0
    for _ in range(runs):
        got, _ = difference_interval(list(rng.normal(5, 1, 4)), list(rng.normal(4, 2, 4)), confidence=0.9)
        hits += got.low <= -1 <= got.high
    assert 0.86 < hits / runs < 0.95


def test_spread_from_a_range() -> None:
    rng = np.random.default_rng(3)
    sample = rng.normal(0, 2, (20_000, 4))
    estimates = [sd_from_range(low, high, 4) for low, high in zip(sample.min(1), sample.max(1), strict=True)]
    assert np.mean(estimates) == pytest.approx(2, rel=0.02)
    with pytest.raises(ValueError, match="runs: wanted 2 to 10, got 1"):
        sd_from_range(0, 1, 1)
    with pytest.raises(ValueError, match="high: wanted at least low"):
        sd_from_range(1, 0, 4)


@pytest.mark.parametrize(
    ("mtp", "label", "percent"),
    [
        (0, "64K", 5.47),
        (0, "100K", 7.52),
        (1, "64K", 4.36),
        (1, "100K", 6.30),
        (3, "64K", 2.40),
        (3, "100K", 3.45),
    ],
)
def test_reduction_of_the_papers_repetitions(mtp: int, label: str, percent: float) -> None:
    got = reduction_interval(*PAPER[mtp, label])
    assert 100 * got.value == pytest.approx(percent, abs=0.006)
    assert got.low < got.value < got.high


def test_reduction_interval_is_that_of_the_ratio() -> None:
    got = reduction_interval(FIRST, SECOND)
    logs = stats.ttest_ind(np.log(SECOND), np.log(FIRST), equal_var=False).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((1 - math.exp(logs.high), 1 - math.exp(logs.low)))
    scaled = reduction_interval([7 * value for value in FIRST], [7 * value for value in SECOND])
    assert scaled.value == pytest.approx(got.value) and scaled.low == pytest.approx(got.low)
    single = reduction_interval([2.0], [1.0])
    assert single.value == 0.5 and math.isnan(single.low)
    with pytest.raises(ValueError, match="candidate: wanted positive values"):
        reduction_interval(FIRST, [1.0, 0.0])
