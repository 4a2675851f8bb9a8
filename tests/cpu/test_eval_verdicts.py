"""Verdicts keep their error rate: over looks, over tasks, and on a machine that drifts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from eval.campaigns.verdicts import (
    ERROR_RATE,
    LOOKS,
    Judgement,
    Order,
    bounds,
    decide,
    detectable_difference,
    drift_free_difference,
    holm,
    judge_difference,
    judge_noninferiority,
    last_look,
    looks_at,
    next_look,
    p_above,
    p_below,
    repetitions_needed,
    variant_order,
)

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(5)
OFF, ON = RNG.normal(10, 1, 32), RNG.normal(10, 1, 32)


# ---------------------------------------------------------------- the estimate


@pytest.mark.parametrize("order", ["abba", "alternate"])
@pytest.mark.parametrize("count", [3, 4, 7, 32])
def test_difference_is_that_of_a_linear_model(count: int, order: Order) -> None:
    """Against fits by normal equations, with the standard error and the freedom of Welch's test."""
    got = drift_free_difference(OFF[:count], ON[:count], order)
    values, rows = [], []
    for position, (repetition, variant) in enumerate(variant_order(count, order)):
        values.append((OFF if variant == "off" else ON)[repetition - 1])
        rows.append([1.0, position, variant == "on"])
    x, y = np.array(rows, dtype=float), np.array(values)
    inverse = np.linalg.inv(x.T @ x)
    weights = (inverse @ x.T)[2]
    parts = []
    for is_on in (0.0, 1.0):
        side = x[:, 2] == is_on
        line = np.polynomial.Polynomial.fit(x[side, 1], y[side], 1)
        variance = ((y[side] - line(x[side, 1])) ** 2).sum() / (count - 2)
        parts.append(variance * (weights[side] ** 2).sum())
    freedom = sum(parts) ** 2 / sum(part**2 / (count - 2) for part in parts)
    assert got.repetitions == count
    assert float(got.freedom) == pytest.approx(freedom) and count - 2 <= freedom <= 2 * (count - 2)
    assert float(got.difference) == pytest.approx((inverse @ x.T @ y)[2])
    assert float(got.error) == pytest.approx(math.sqrt(sum(parts)))
    assert got.unit_error == pytest.approx(math.sqrt(inverse[2, 2]))


def test_rounding_is_the_least_spread() -> None:
    values = [1.0] * 4
    assert float(drift_free_difference(values, values, "abba").error) == pytest.approx(0, abs=1e-12)
    got = drift_free_difference(values, values, "abba", resolution=0.01)
    assert float(got.error) == pytest.approx(0.01 / math.sqrt(12) * got.unit_error)
    wide = drift_free_difference(OFF, ON, "abba")
    assert drift_free_difference(OFF, ON, "abba", resolution=0.01).error == wide.error


# ---------------------------------------------------------------- looks


def test_the_shares_spend_the_error_rate_once() -> None:
    assert sum(LOOKS.values()) <= 1.0
    assert list(LOOKS) == sorted(LOOKS) and min(LOOKS) >= 6


def test_looks_that_were_passed() -> None:
    assert [look.repetitions for look in looks_at(OFF[:9], ON[:9], "abba")] == [6, 8]
    assert looks_at(OFF[:5], ON[:5], "abba") == [] == looks_at([], [], "abba")
    assert [next_look(count) for count in (0, 6, 9, 31, 32)] == [6, 8, 12, 32, None]
    assert [last_look(count) for count in (5, 6, 9, 40)] == [None, 6, 8, 32]


def test_p_values_are_students_over_the_share() -> None:
    (look,) = looks_at(OFF[:6], ON[:6], "abba")
    for bound in (look.difference - 3 * look.error, look.difference + 3 * look.error):
        t, share = (look.difference - bound) / look.error, LOOKS[6]
        assert float(p_above([look], bound)) == pytest.approx(min(1, stats.t.sf(t, look.freedom) / share))
        assert float(p_below([look], bound)) == pytest.approx(min(1, stats.t.cdf(t, look.freedom) / share))
    assert float(p_above([], 0.0)) == 1.0


def test_the_smallest_p_value_over_the_looks_stays() -> None:
    looks = looks_at(OFF, ON, "abba")
    each = [float(p_above([look], -0.5)) for look in looks]
    assert float(p_above(looks, -0.5)) == min(each)


def test_bounds_are_where_the_p_value_is_the_error_rate() -> None:
    looks = looks_at(OFF, ON, "abba")
    low, high = bounds(looks, 0.03)
    assert float(p_above(looks, low)) == pytest.approx(0.03)
    assert float(p_below(looks, high)) == pytest.approx(0.03)
    assert [float(end) for end in bounds([], 0.03)] == [-math.inf, math.inf]


def test_an_exact_difference_is_decided_off_the_bound_only() -> None:
    (look,) = looks_at([1.0] * 6, [0.5] * 6, "abba")
    exact = [replace(look, difference=np.array(-0.5), error=np.array(0.0))]
    assert [float(p_above(exact, bound)) for bound in (-0.6, -0.5, -0.4)] == [0.0, 1.0, 1.0]
    assert [float(p_below(exact, bound)) for bound in (-0.6, -0.5, -0.4)] == [1.0, 1.0, 0.0]


# ---------------------------------------------------------------- tasks


def test_holm_rejects_as_the_closed_bonferroni_test() -> None:
    """A hypothesis falls where every intersection that holds it does, by Bonferroni."""
    from itertools import combinations

    for p in RNG.uniform(0, 0.15, (50, 4)):
        for index, adjusted in enumerate(holm(p)):
            others = [k for k in range(4) if k != index]
            sets = [(index, *rest) for size in range(4) for rest in combinations(others, size)]
            closed = max(len(members) * min(p[list(members)]) for members in sets)
            assert adjusted == pytest.approx(min(1.0, closed))


def test_looks_that_contradict_each_other_decide_nothing() -> None:
    off, on = np.zeros(8), np.array([5.0, 5.1] * 4)
    assert judge_noninferiority([looks_at(off[:6], on[:6], "abba")], [1.0]).good.all()
    looks = looks_at(off[:6], on[:6], "abba") + looks_at(off, on - 40, "abba")[1:]
    both = judge_noninferiority([looks], [1.0])
    assert (float(both.p_good[0]), float(both.p_bad[0])) < (ERROR_RATE, ERROR_RATE)
    assert not both.good.any() and not both.bad.any()


def test_both_directions_of_a_difference_share_the_error_rate() -> None:
    looks = looks_at(OFF[:6], ON[:6] - 20.0, "abba")
    judgement = judge_difference([looks], family=3)
    assert float(judgement.p_good[0]) == pytest.approx(3 * 2 * float(p_below(looks, 0.0)))
    assert judgement.p_good[0] < 0.05
    assert float(judgement.p_bad[0]) == 1.0
    mirrored = judge_difference([looks_at(ON[:6] - 20.0, OFF[:6], "abba")], family=3)
    assert mirrored.p_good[0] == 1.0 > mirrored.p_bad[0]


def test_the_error_rate_itself_is_enough() -> None:
    edge, none = np.array([ERROR_RATE]), np.array([1.0])
    above = np.nextafter(edge, 1)
    assert Judgement(edge, none).good.all() and Judgement(none, edge).bad.all()
    assert not Judgement(above, none).good.any() and not Judgement(none, above).bad.any()
    # At the error rate both claims are shown, and so neither is.
    assert not Judgement(edge, edge).good.any() and not Judgement(edge, edge).bad.any()


# ---------------------------------------------------------------- power


def test_detectable_difference_is_found_as_often_as_it_says() -> None:
    sd, count, rate = 0.4, 8, 0.0125
    shift = detectable_difference(sd, count, "abba", rate)
    assert shift is not None
    off, on = np.random.default_rng(1).normal(0, sd, (2, 4000, count))
    look = drift_free_difference(off, on + shift, "abba")
    limit = stats.t.isf(rate * LOOKS[count], look.freedom)
    assert (look.difference / look.error > limit).mean() == pytest.approx(0.9, abs=0.02)
    assert detectable_difference(sd, 5, "abba", rate) is None
    assert detectable_difference(sd, 9, "abba", rate) == shift  # the ninth waits for the next look


def test_repetitions_needed_is_the_first_look_that_suffices() -> None:
    sd, rate = 0.4, 0.0125
    for count in LOOKS:
        shift = detectable_difference(sd, count, "abba", rate)
        assert shift is not None and repetitions_needed(sd, shift, "abba", rate) in [
            look for look in LOOKS if look <= count
        ]
    assert repetitions_needed(sd, 0.01, "abba", rate) is None


# ---------------------------------------------------------------- decisions

BASE = [90.0, 90.2, 90.1, 90.0, 90.2, 90.1, 90.0, 90.2]


def _shifted(by: float) -> list[float]:
    # Not in step with the other side, or the differences would have no spread.
    return [by + value for value in (90.1, 90.0, 90.2, 90.1, 90.0, 90.2, 90.1, 90.1)]


@pytest.mark.parametrize(
    ("off", "on", "verdict"),
    [
        (BASE, _shifted(0.0), "within"),
        (BASE, _shifted(2.0), "within"),  # a gain is never a regression
        (BASE, _shifted(-0.1), "within"),
        (BASE, _shifted(-2.0), "regression"),
        (BASE, _shifted(-0.5), "inconclusive"),  # a loss of just the margin
        ([85.0, 95.0] * 4, [95.0, 85.0] * 4, "inconclusive"),  # too noisy to exclude anything
        (BASE[:3], _shifted(0.0)[:3], "inconclusive"),  # before the first look
        ([], [], "inconclusive"),
        ([90.0] * 8, [90.0] * 8, "within"),
        ([90.0] * 8, [89.0] * 8, "regression"),
        ([90.0] * 8, [89.5] * 8, "inconclusive"),
    ],
)
def test_verdict_about_a_margin(off: list[float], on: list[float], verdict: str) -> None:
    (got,) = decide([(off, on)], "abba", margins=[0.5], resolution=0.01)
    assert (got.verdict, got.repetitions, got.margin) == (verdict, len(off), 0.5)


@pytest.mark.parametrize(("shift", "verdict"), [(-1.0, "faster"), (1.0, "slower"), (0.0, "open")])
def test_verdict_about_times(shift: float, verdict: str) -> None:
    (got,) = decide([(BASE, _shifted(shift))], "abba")
    assert (got.verdict, got.margin) == (verdict, None)


def test_a_verdict_changes_where_the_p_value_reaches_its_share() -> None:
    look = drift_free_difference(BASE, _shifted(0.0), "abba")
    half = float(stats.t.isf(0.05 * LOOKS[8], look.freedom) * look.error)
    for end, inside, outside in ((half, "within", "inconclusive"), (-half, "inconclusive", "regression")):
        edge = -0.5 + end - float(look.difference)
        for shift, verdict in ((edge + 1e-6, inside), (edge - 1e-6, outside)):
            assert decide([(BASE, _shifted(shift))], "abba", margins=[0.5])[0].verdict == verdict


def test_interval_and_estimate_of_a_decision() -> None:
    (got,) = decide([(BASE, _shifted(-0.2))], "abba", 3, margins=[0.5])
    whole = drift_free_difference(BASE, _shifted(-0.2), "abba")
    low, high = bounds(looks_at(BASE, _shifted(-0.2), "abba"), 0.05 / 3)
    assert (got.difference, got.low, got.high) == (float(whole.difference), float(low), float(high))
    assert got.sd == pytest.approx(float(whole.error) / whole.unit_error)
    (times,) = decide([(BASE, _shifted(-0.2))], "abba", 3)
    assert times.low == float(bounds(looks_at(BASE, _shifted(-0.2), "abba"), 0.025 / 3)[0])
    (early,) = decide([([10.0], [9.0])], "abba", 1)
    assert (early.difference, early.low, early.high, early.sd, early.p_good) == (-1.0, None, None, None, 1.0)
    assert decide([([], [])], "abba")[0].difference is None and decide([], "abba") == []


def test_tasks_are_judged_together() -> None:
    pair = (BASE, _shifted(-0.39))
    (alone,) = decide([pair], "abba", margins=[0.5])
    four = decide([pair] * 4, "abba", margins=[0.5] * 4)[0]
    (of_four,) = decide([pair], "abba", 4, margins=[0.5])
    assert alone.p_good < four.p_good == of_four.p_good == pytest.approx(4 * alone.p_good)
    assert (alone.verdict, four.verdict) == ("within", "inconclusive")
    assert alone.low is not None and of_four.low is not None and of_four.low < alone.low


def test_a_verdict_changes_at_a_look_only() -> None:
    """Seven runs decide as six do: a seventh that would tip it has to wait for the eighth."""
    six, seven = (BASE[:6], _shifted(-0.37)[:6]), ([*BASE[:6], 95.0], [*_shifted(-0.37)[:6], 85.0])
    first, second, third = (
        decide([runs], "abba", margins=[0.5])[0] for runs in (six, seven, (BASE, _shifted(-0.37)))
    )
    assert first.p_good == second.p_good and first.verdict == second.verdict == "inconclusive"
    assert third.verdict == "within"


def test_printed_scores_that_agree_are_not_exact() -> None:
    """Two decimals hide differences of 0.01, so that a margin as small is not shown by equal scores."""
    for margin, verdict in ((0.003, "inconclusive"), (0.02, "within")):
        (got,) = decide([([90.0] * 8, [90.0] * 8)], "abba", margins=[margin], resolution=0.01)
        assert got.verdict == verdict


# ---------------------------------------------------------------- the simulation

RESULTS = json.loads((ROOT / "eval" / "results" / "verdict_simulation.json").read_text())


def test_committed_rates_keep_their_promises() -> None:
    promised = [row for row in RESULTS["rows"] if row["bound"]]
    assert len(promised) >= 12 and RESULTS["campaigns"] >= 10_000
    assert (
        RESULTS["error_rate"] == ERROR_RATE and {int(key): v for key, v in RESULTS["looks"].items()} == LOOKS
    )
    for row in promised:
        assert row["rate"] <= row["limit"] if row["bound"] == "at most" else row["rate"] >= row["limit"], row
