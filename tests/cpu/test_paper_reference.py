"""The paper's reference against the oracle: exact on every row and hint, and honest about its cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gvr_topk.evaluation import paper_reference as reference
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.evaluation.paper_reference import CAPACITY, DONE, RowResult, topk_row
from gvr_topk.evaluation.trace import shipped_trace
from tests.adversarial import adversarial_hints, adversarial_rows

GUESSES = ("mean", "quantile")


def oracle(row: np.ndarray, k: int) -> np.ndarray:
    return sorted_topk(torch.from_numpy(row)[None], torch.tensor([len(row)]), k)[0].numpy()


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


any_float32 = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0]),
)
rows = st.one_of(
    hnp.arrays(np.float32, st.integers(0, 80), elements=any_float32),
    hnp.arrays(np.float32, st.integers(0, 80), elements=st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
)
hints = st.one_of(
    st.none(),
    hnp.arrays(np.int32, st.integers(0, 40), elements=st.integers(-3, 90)),
    hnp.arrays(np.int32, st.integers(0, 40), elements=st.integers(-(2**31), 2**31 - 1)),
)


@settings(max_examples=400, deadline=None)
@given(
    row=rows,
    k=st.integers(1, 30),
    spare=st.integers(0, 30),
    hint=hints,
    offset=st.integers(-2, 2),
    guess=st.sampled_from(GUESSES),
    alpha=st.one_of(st.none(), st.floats(-1, 1)),
)
def test_equals_the_oracle_whatever_the_row_and_the_hint(row, k, spare, hint, offset, guess, alpha):
    result = topk_row(row, k, hint, hint_offset=offset, guess=guess, alpha=alpha, capacity=k + spare)
    np.testing.assert_array_equal(result.indices, oracle(row, k))
    assert_consistent(result, row, k, k + spare)


@pytest.mark.parametrize(
    "n, k, capacity", [(12_000, 2048, CAPACITY), (700, 64, 192), (500, 1, 1), (40, 50, 50)]
)
def test_adversarial_rows_with_adversarial_hints(n, k, capacity):
    bad_hints = adversarial_hints(n, k, seed=1)
    for name, row in adversarial_rows(n, k, seed=1).items():
        wanted = oracle(row, k)
        given_hints = {"none": None, "perfect": wanted, **bad_hints}
        for hint_name, hint in given_hints.items():
            for guess in GUESSES:
                result = topk_row(row, k, hint, guess=guess, alpha=0.5, capacity=capacity)
                np.testing.assert_array_equal(result.indices, wanted, err_msg=f"{name}, hint {hint_name}")
                assert_consistent(result, row, k, capacity)


def assert_consistent(result: RowResult, row: np.ndarray, k: int, capacity: int) -> None:
    """The statistics agree with the row and keep the promised bounds."""
    stats = result.stats
    assert result.indices.dtype == np.int32
    assert stats.done in DONE.values()
    assert stats.passes <= reference.FLOAT_PASSES + 32
    if stats.done == "short":
        assert len(row) <= k and stats.passes == 0
        return
    assert k <= stats.candidates <= capacity and stats.passes >= 1


# Holes of the published kernel, each once. K and sizes are the production ones.


def test_search_never_ends_under_k():
    # 400 huge values over 10,000 that differ by one ulp: no line between the two finds the few
    # thresholds that leave 512 to 1536.
    rng = np.random.default_rng(0)
    crowd = (np.float32(-1).view(np.uint32) + np.arange(10_000, dtype=np.uint32)).view(np.float32)
    row = np.concatenate([rng.permutation(crowd), 1e30 * (1 + rng.random(400, dtype=np.float32))])
    row = row.astype(np.float32)
    result = topk_row(row, 512, np.arange(10_000, 10_400, dtype=np.int32), capacity=1536)
    np.testing.assert_array_equal(result.indices, oracle(row, 512))
    assert (result.indices >= 0).all()
    assert result.stats.done == "key"


def test_more_ties_than_capacity_keep_every_greater_element():
    row = np.zeros(20_000, dtype=np.float32)
    row[-2000:] = np.arange(1, 2001)
    result = topk_row(row, 2048, np.arange(2048, dtype=np.int32))
    np.testing.assert_array_equal(result.indices, np.r_[0:48, 18_000:20_000])
    assert result.stats.done == "tie_key"


# What the statistics say.


def test_hint_statistics_count_distinct_positions_in_range():
    row = np.arange(100, dtype=np.float32)  # the top 10 are 90..99
    hint = np.array([95, 95, 96, 3, -1, 100, 2**31 - 1], dtype=np.int32)
    stats = topk_row(row, 10, hint, capacity=30).stats
    assert (stats.hint_valid, stats.hit_count, stats.hit_ratio) == (3, 2, 0.2)
    assert stats.alpha == 3 / 4  # of 95, 95, 96 and 3
    assert stats.guess == "hint"


def test_shipped_trace_hit_ratios_and_passes():
    """Hit ratio at K/N = 2048/32768 by offset, and the quantile guess against the mean."""
    trace, k = shipped_trace(), 2048
    hits: dict[int, list[float]] = {0: [], 1: []}
    one_pass = dict.fromkeys(GUESSES, 0)
    previous, alpha = None, None
    for step in range(trace.steps):
        row = trace.scores(step)
        result = topk_row(row, k, previous, guess="quantile", alpha=alpha)
        if previous is not None:
            hits[0].append(result.stats.hit_ratio)
            hits[1].append(float(np.isin(previous + 1, result.indices).mean()))
            one_pass["quantile"] += result.stats.passes == 1
            one_pass["mean"] += topk_row(row, k, previous).stats.passes == 1
        if step % 32 == 0:
            np.testing.assert_array_equal(result.indices, oracle(row, k))
        previous, alpha = result.indices, result.stats.alpha
    assert round(float(np.mean(hits[0])), 2) == 0.86
    assert round(float(np.mean(hits[1])), 2) == 0.67
    # A good hint's mean lies above the k-th value, so the mean guess misses; the quantile does not.
    assert one_pass["quantile"] > 0.9 * len(hits[0])
    assert one_pass["mean"] < 0.1 * len(hits[0])
