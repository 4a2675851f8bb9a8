"""Verdicts keep their error rate: over looks, over tasks, and on a machine that drifts."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from eval.campaigns import verdicts
from eval.campaigns.verdicts import (
    ERROR_RATE,
    LOOKS,
    bounds,
    decide,
    drift_free_difference,
    holm,
    looks_at,
    next_look,
    p_above,
    p_below,
    variant_order,
)

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(5)
OFF, ON = RNG.normal(10, 1, (2, 32)).tolist()


@pytest.mark.parametrize("count", [3, 4, 7, 32])
def test_difference_is_that_of_a_linear_model(count: int) -> None:
    """Against fits by normal equations, with the standard error and the freedom of Welch's test."""
    got = drift_free_difference(OFF[:count], ON[:count])
    values, rows = [], []
    for position, (repetition, variant) in enumerate(variant_order(count)):
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
    assert got.freedom == pytest.approx(freedom) and count - 2 <= freedom <= 2 * (count - 2)
    assert got.difference == pytest.approx((inverse @ x.T @ y)[2])
    assert got.error == pytest.approx(math.sqrt(sum(parts)))
    same = drift_free_difference([1.0] * count, [1.0] * count, resolution=0.01)
    assert same.error == pytest.approx(0.01 / math.sqrt(12) * math.sqrt(inverse[2, 2]))
    assert drift_free_difference([1.0] * count, [1.0] * count).error == pytest.approx(0, abs=1e-12)
    assert drift_free_difference(OFF[:count], ON[:count], resolution=0.01).error == got.error


def test_the_shares_spend_the_error_rate_once() -> None:
    assert sum(LOOKS.values()) <= 1.0
    assert list(LOOKS) == sorted(LOOKS) and min(LOOKS) >= 6


def test_looks_that_were_passed() -> None:
    assert [look.repetitions for look in looks_at(OFF[:9], ON[:9])] == [6, 8]
    assert looks_at(OFF[:5], ON[:5]) == [] == looks_at([], [])
    assert [next_look(count) for count in (0, 6, 9, 31, 32)] == [6, 8, 12, 32, None]


def test_p_values_are_students_over_the_share() -> None:
    (look,) = looks_at(OFF[:6], ON[:6])
    for bound in (look.difference - 3 * look.error, look.difference + 3 * look.error):
        t, share = (look.difference - bound) / look.error, LOOKS[6]
        assert p_above([look], bound) == pytest.approx(min(1, stats.t.sf(t, look.freedom) / share))
        assert p_below([look], bound) == pytest.approx(min(1, stats.t.cdf(t, look.freedom) / share))
    assert p_above([], 0.0) == 1.0


def test_the_smallest_p_value_stays_and_bounds_are_where_it_is_the_error_rate() -> None:
    looks = looks_at(OFF, ON)
    assert p_above(looks, -0.5) == min(p_above([look], -0.5) for look in looks)
    low, high = bounds(looks, 0.03)
    assert p_above(looks, low) == pytest.approx(0.03)
    assert p_below(looks, high) == pytest.approx(0.03)
    assert bounds([], 0.03) == (-math.inf, math.inf)


def test_an_exact_difference_is_decided_off_the_bound_only() -> None:
    (look,) = looks_at([1.0] * 6, [0.5] * 6)
    exact = [replace(look, difference=-0.5, error=0.0)]
    assert [p_above(exact, bound) for bound in (-0.6, -0.5, -0.4)] == [0.0, 1.0, 1.0]
    assert [p_below(exact, bound) for bound in (-0.6, -0.5, -0.4)] == [1.0, 1.0, 0.0]


def test_holm_rejects_as_the_closed_bonferroni_test() -> None:
    """A hypothesis falls where every intersection that holds it does, by Bonferroni."""
    from itertools import combinations

    for p in RNG.uniform(0, 0.15, (50, 4)):
        for index, adjusted in enumerate(holm(p.tolist(), 4)):
            others = [k for k in range(4) if k != index]
            sets = [(index, *rest) for size in range(4) for rest in combinations(others, size)]
            closed = max(len(members) * min(p[list(members)]) for members in sets)
            assert adjusted == pytest.approx(min(1.0, closed))


def test_both_directions_of_a_difference_share_the_error_rate() -> None:
    off, on = OFF[:6], [value - 20.0 for value in ON[:6]]
    (got,) = decide([(off, on)], 3)
    assert got.p_good == pytest.approx(3 * 2 * p_below(looks_at(off, on), 0.0))
    assert got.p_good < 0.05 and got.p_bad == 1.0
    (mirrored,) = decide([(on, off)], 3)
    assert mirrored.p_good == 1.0 > mirrored.p_bad


@pytest.mark.parametrize(
    ("p_good", "p_bad", "verdict"),
    [
        (ERROR_RATE, 1.0, "within"),
        (1.0, ERROR_RATE, "regression"),
        (math.nextafter(ERROR_RATE, 1), 1.0, "inconclusive"),
        (1.0, math.nextafter(ERROR_RATE, 1), "inconclusive"),
        (ERROR_RATE, ERROR_RATE, "inconclusive"),  # looks that contradict each other
    ],
)
def test_the_error_rate_itself_is_enough(
    p_good: float, p_bad: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "p_above", lambda looks, bound: p_good)
    monkeypatch.setattr(verdicts, "p_below", lambda looks, bound: p_bad)
    assert decide([(OFF, ON)], 1, margins=[1.0])[0].verdict == verdict


def test_a_false_verdict_is_as_rare_as_the_page_says() -> None:
    """Campaigns of four tasks that lose just their margins; p-values after 32 runs are those of all looks."""
    drawn = np.random.default_rng(1).normal(0, 1, (300, 4, 2, 32))
    drawn[:, :, 1] -= 1.0
    wrong = sum(
        any(got.verdict == "within" for got in decide(runs, 4, margins=[1.0] * 4)) for runs in drawn.tolist()
    )
    assert 1 <= wrong <= 0.05 * 300


BASE = [90.0, 90.2, 90.1, 90.0, 90.2, 90.1, 90.0, 90.2]


def _shifted(by: float) -> list[float]:
    # Not in step with the other side, or the differences would have no spread.
    return [by + value for value in (90.1, 90.0, 90.2, 90.1, 90.0, 90.2, 90.1, 90.1)]


@pytest.mark.parametrize(
    ("off", "on", "margin", "verdict"),
    [
        (BASE, _shifted(0.0), 0.5, "within"),
        (BASE, _shifted(2.0), 0.5, "within"),  # a gain is never a regression
        (BASE, _shifted(-0.1), 0.5, "within"),
        (BASE, _shifted(-2.0), 0.5, "regression"),
        (BASE, _shifted(-0.5), 0.5, "inconclusive"),  # a loss of just the margin
        ([85.0, 95.0] * 4, [95.0, 85.0] * 4, 0.5, "inconclusive"),  # too noisy to exclude anything
        (BASE[:3], _shifted(0.0)[:3], 0.5, "inconclusive"),  # before the first look
        ([], [], 0.5, "inconclusive"),
        ([90.0] * 8, [90.0] * 8, 0.5, "within"),
        ([90.0] * 8, [90.0] * 8, 0.02, "within"),
        ([90.0] * 8, [90.0] * 8, 0.003, "inconclusive"),  # two decimals hide differences of 0.01
        ([90.0] * 8, [89.0] * 8, 0.5, "regression"),
        ([90.0] * 8, [89.5] * 8, 0.5, "inconclusive"),
    ],
)
def test_verdict_about_a_margin(off: list[float], on: list[float], margin: float, verdict: str) -> None:
    (got,) = decide([(off, on)], 1, margins=[margin], resolution=0.01)
    assert (got.verdict, got.repetitions, got.margin) == (verdict, len(off), margin)


@pytest.mark.parametrize(("shift", "verdict"), [(-1.0, "faster"), (1.0, "slower"), (0.0, "open")])
def test_verdict_about_times(shift: float, verdict: str) -> None:
    (got,) = decide([(BASE, _shifted(shift))], 1)
    assert (got.verdict, got.margin) == (verdict, None)


def test_a_verdict_changes_where_the_p_value_reaches_its_share() -> None:
    look = drift_free_difference(BASE, _shifted(0.0))
    half = stats.t.isf(0.05 * LOOKS[8], look.freedom) * look.error
    for end, inside, outside in ((half, "within", "inconclusive"), (-half, "inconclusive", "regression")):
        edge = -0.5 + end - look.difference
        for shift, verdict in ((edge + 1e-6, inside), (edge - 1e-6, outside)):
            assert decide([(BASE, _shifted(shift))], 1, margins=[0.5])[0].verdict == verdict


def test_interval_and_estimate_of_a_decision() -> None:
    (got,) = decide([(BASE, _shifted(-0.2))], 3, margins=[0.5])
    whole = drift_free_difference(BASE, _shifted(-0.2))
    low, high = bounds(looks_at(BASE, _shifted(-0.2)), 0.05 / 3)
    assert (got.difference, got.low, got.high) == (whole.difference, low, high)
    (times,) = decide([(BASE, _shifted(-0.2))], 3)
    assert times.low == bounds(looks_at(BASE, _shifted(-0.2)), 0.025 / 3)[0]
    (early,) = decide([([10.0], [9.0])], 1)
    assert (early.difference, early.low, early.high, early.p_good) == (-1.0, None, None, 1.0)
    assert decide([([], [])], 1)[0].difference is None and decide([], 0) == []


def test_tasks_are_judged_together() -> None:
    pair = (BASE, _shifted(-0.39))
    (alone,) = decide([pair], 1, margins=[0.5])
    four = decide([pair] * 4, 4, margins=[0.5] * 4)[0]
    (of_four,) = decide([pair], 4, margins=[0.5])
    assert alone.p_good < four.p_good == of_four.p_good == pytest.approx(4 * alone.p_good)
    assert (alone.verdict, four.verdict) == ("within", "inconclusive")
    assert alone.low is not None and of_four.low is not None and of_four.low < alone.low


def test_a_verdict_changes_at_a_look_only() -> None:
    """Seven runs decide as six do: a seventh that would tip it has to wait for the eighth."""
    six, seven = (BASE[:6], _shifted(-0.37)[:6]), ([*BASE[:6], 95.0], [*_shifted(-0.37)[:6], 85.0])
    first, second, third = (
        decide([runs], 1, margins=[0.5])[0] for runs in (six, seven, (BASE, _shifted(-0.37)))
    )
    assert first.p_good == second.p_good and first.verdict == second.verdict == "inconclusive"
    assert third.verdict == "within"


RESULTS = json.loads((ROOT / "eval" / "results" / "verdict_simulation.json").read_text())


def test_committed_rates_keep_their_promises() -> None:
    promised = [row for row in RESULTS["rows"] if row["bound"]]
    assert len(promised) >= 12 and RESULTS["campaigns"] >= 10_000
    assert RESULTS["error_rate"] == ERROR_RATE
    assert {int(key): v for key, v in RESULTS["looks"].items()} == LOOKS
    for row in promised:
        assert row["rate"] <= row["limit"] if row["bound"] == "at most" else row["rate"] >= row["limit"], row


def test_the_docs_show_committed_rates() -> None:
    section = (ROOT / "docs" / "verdicts.md").read_text().partition("## Simulation")[2]
    shown = set(re.findall(r"\d+\.\d(?= %)", section))
    assert len(shown) > 10 and shown <= {f"{100 * row['rate']:.1f}" for row in RESULTS["rows"]}
