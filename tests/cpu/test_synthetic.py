"""The generator keeps the paper's qualitative facts; hard rows hold what they name."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gvr_topk.evaluation.paper_reference import CAPACITY
from gvr_topk.evaluation.synthetic import LayerGenerator
from tests.adversarial import adversarial_rows

N, K = 70_690, 2048


def top(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argpartition(scores, len(scores) - k)[-k:]


def hit_ratio(source: LayerGenerator, k: int) -> float:
    tops = [top(source.scores(step), k) for step in range(source.steps)]
    return float(np.mean([np.isin(a, b).mean() for a, b in pairwise(tops)]))


@pytest.mark.parametrize("layer", [20, 40, 60])
def test_deep_layers_keep_about_44_percent(layer):
    assert 0.40 < hit_ratio(LayerGenerator(layer, N, 4), K) < 0.52


@pytest.mark.parametrize("layer", [0, 1])
def test_first_layers_keep_next_to_nothing(layer):
    assert 0.010 < hit_ratio(LayerGenerator(layer, N, 4), K) < 0.030


def test_same_seed_same_rows_in_any_order():
    forward = LayerGenerator(22, 500, 5, seed=7)
    rows = [forward.scores(step) for step in range(5)]
    other = LayerGenerator(22, 500, 5, seed=7)
    for step in (3, 1, 4, 4, 0):
        np.testing.assert_array_equal(other.scores(step), rows[step])
    assert not np.array_equal(LayerGenerator(22, 500, 5, seed=8).scores(0), rows[0])
    assert not np.array_equal(LayerGenerator(21, 500, 5, seed=7).scores(0), rows[0])


def test_adversarial_rows_hold_what_they_name():
    n, k = 40_000, K
    rows = adversarial_rows(n, k, 3)
    above_and_at = {
        "greater_2000_equal_100": (2000, 100),
        "ties_beyond_capacity": (k - 1, max(CAPACITY + 1, 4 * k)),
        "k_minus_one_greater": (k - 1, n - k + 1),
        "k_greater_rest_equal": (k, n - k),
        "k_plus_one_equal": (0, k + 1),
    }
    for name, (above, at) in above_and_at.items():
        assert (np.count_nonzero(rows[name] > 0), np.count_nonzero(rows[name] == 0)) == (above, at), name
    assert 0 < np.count_nonzero(rows["relu_zero_plateau"]) < k
    assert (rows["relu_zero_plateau"] >= 0).all()
    assert 0 < np.isnan(rows["some_nan"]).sum() < k < np.isnan(rows["nan_straddles_k"]).sum()
    assert np.isinf(rows["inf_mix"]).sum() > k
    assert (np.abs(rows["denormals"]) < np.finfo(np.float32).tiny).all()
    assert len(np.unique(rows["denormals"])) > n / 2
    assert np.signbit(rows["signed_zeros"]).any() and not np.signbit(rows["signed_zeros"]).all()
    crowd = rows["crowd_within_10_ulps"]
    assert np.count_nonzero((crowd >= 1) & (crowd < 1 + 10 * np.finfo(np.float32).eps)) == n // 2
    assert rows["outlier_1e38"].max() == np.float32(1e38)
    assert np.sort(rows["outlier_1e38"])[-2] < 1e-20
    assert set(top(rows["top_in_first_chunk"], k)) == set(range(k))
    assert set(top(rows["top_in_last_chunk"], k)) == set(range(n - k, n))
    assert (np.diff(rows["ascending"]) >= 0).all() and (np.diff(rows["descending"]) <= 0).all()
