"""Draws have the distribution that they claim, tails included, whatever the seeds and positions are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from gvr_topk.sampling import arithmetic as numbers
from gvr_topk.sampling import sample
from gvr_topk.sampling.arguments import Noise
from gvr_topk.sampling.reference import Kept, Row, Setting, draw, keep

DRAWS = 1_000_000
LEAST_P = 1e-6
Array = np.ndarray[Any, Any]


def drawn(values: Array, setting: Setting, noise: Noise, seeds: Any, positions: Array) -> tuple[Kept, Array]:
    row = Row(values.astype(np.float32))
    kept = keep(row, setting)
    return kept, draw(kept, row, noise, np.broadcast_to(seeds, positions.shape), positions)


def shares(kept: Kept, values: Array, temperature: float) -> Array:
    """Probabilities of the kept tokens by fp64 arithmetic."""
    scaled = values[kept.ids].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def assert_like(tokens: Array, kept: Kept, expected: Array) -> None:
    assert np.isin(tokens, kept.ids).all()
    counts = np.bincount(np.searchsorted(kept.ids, tokens), minlength=len(kept.ids))
    rare = expected * len(tokens) < 10  # counted together
    grouped = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, wanted = (side[grouped[1] > 0] for side in grouped)
    assert stats.chisquare(observed, wanted * len(tokens)).pvalue > LEAST_P


ROWS = {
    "gaussian": (lambda rng: rng.standard_normal(300) * 3, Setting()),
    "flat": (lambda rng: np.zeros(1000), Setting()),
    "warm top-p": (
        lambda rng: rng.standard_normal(5000) * 4,
        Setting(np.float32(1.3), top_p=np.float32(0.95)),
    ),
    "cold": (lambda rng: rng.standard_normal(2000), Setting(np.float32(0.25))),
    "min-p": (lambda rng: rng.standard_normal(400) * 2, Setting(min_p=np.float32(0.01))),
    "top-k": (lambda rng: np.round(rng.standard_normal(100), 1), Setting(np.float32(0.7), top_k=20)),
}


@pytest.mark.parametrize("name", ROWS)
def test_inverse_cdf(name: str) -> None:
    make, setting = ROWS[name]
    values = make(np.random.default_rng(4)).astype(np.float32)
    kept, tokens = drawn(values, setting, Noise.CDF, 99, np.arange(DRAWS))
    assert_like(tokens, kept, shares(kept, values, float(setting.temperature)))
    kept, tokens = drawn(values, setting, Noise.CDF, np.arange(DRAWS) * 7919, np.full(DRAWS, 12))
    assert_like(tokens, kept, shares(kept, values, float(setting.temperature)))


@pytest.mark.parametrize("by", ["positions", "seeds"])
def test_gumbel(by: str) -> None:
    values = np.array([0.0, 1.0, -2.0, 1.5, 0.25, -6.0], np.float32)
    setting = Setting(np.float32(0.8), min_p=np.float32(1e-3))
    draws = DRAWS if by == "positions" else DRAWS // 5
    many, few = np.arange(draws), np.full(draws, 3)
    seeds, positions = (few, many) if by == "positions" else (many << 20, few)
    kept, tokens = drawn(values, setting, Noise.MURMUR, seeds, positions)
    assert len(kept.ids) == 5
    assert_like(tokens, kept, shares(kept, values, 0.8))


@pytest.mark.parametrize("gap", [10, 14, 18, 20])
def test_tail_of_inverse_cdf(gap: int) -> None:
    """One token, and 200,000 that are so many nats below it."""
    values = np.full(200_001, -gap, np.float32)
    values[77_777] = 0
    _, tokens = drawn(values, Setting(), Noise.CDF, gap, np.arange(2 * DRAWS))
    weight = 200_000 * np.exp(-float(gap))
    share, count = weight / (1 + weight), int((tokens != 77_777).sum())
    assert count > 100
    assert abs(count - 2 * DRAWS * share) < 5 * np.sqrt(2 * DRAWS * share * (1 - share))
    tail = tokens[tokens != 77_777]
    assert abs(np.mean(tail) / 100_000 - 1) < 5 * np.sqrt(1 / 3 / count)


@pytest.mark.parametrize("gap", [10, 14, 18, 20])
def test_tail_of_gumbel(gap: int) -> None:
    """The exact share of hashes with which a token so many nats below another one wins.

    Noise never rises with the hash, so a search finds how many hashes of the token beat each of many hashes
    of the other one, which stand evenly among all.
    """
    others = ((np.arange(1 << 15) + 0.5) * 2.0**17).astype(np.uint32)
    to_beat = numbers.gumbel(others)
    low, high = np.zeros(others.size, np.int64), np.full(others.size, 1 << 32, np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        wins = (
            np.float32(-gap) + numbers.gumbel(np.minimum(middle, (1 << 32) - 1).astype(np.uint32)) > to_beat
        )
        low, high = (
            np.where((low < high) & wins, middle + 1, low),
            np.where((low < high) & ~wins, middle, high),
        )
    assert low.mean() / 2**32 == pytest.approx(1 / (1 + np.exp(gap)), rel=2e-3)


@pytest.mark.parametrize("noise", [Noise.CDF, Noise.MURMUR])
def test_neighbors_are_not_correlated(noise: Noise) -> None:
    """Pairs of tokens at positions, or of seeds, that differ by little, and of tokens one bit apart."""
    draws = 100_000
    start = np.arange(draws) * 64
    ones = np.ones(draws, np.int64)
    _, base = drawn(np.zeros(8), Setting(), noise, 5 * ones, start)
    for seeds, positions in (
        (5 * ones, start + 1),
        (5 * ones, start + 32),
        (6 * ones, start),
        (ones * 5 | 1 << 40, start),
    ):
        _, other = drawn(np.zeros(8), Setting(), noise, seeds, positions)
        table = np.bincount(base * 8 + other, minlength=64).reshape(8, 8)
        assert stats.chi2_contingency(table).pvalue > LEAST_P


def test_bytes_of_the_uniform_number() -> None:
    for seeds, positions in ((3, np.arange(DRAWS)), (np.arange(DRAWS), 3), (np.arange(DRAWS) << 32, 0)):
        words = np.broadcast_to(numbers.uniform64(seeds, positions), DRAWS)
        for byte in np.ascontiguousarray(words).view(np.uint8).reshape(DRAWS, 8).T:
            assert stats.chisquare(np.bincount(byte, minlength=256)).pvalue > LEAST_P


@pytest.mark.parametrize("noise", ["cdf", "murmur"])
def test_the_op_makes_these_draws(noise: str) -> None:
    values = np.linspace(-1, 1, 50).astype(np.float32)
    setting = Setting(np.float32(0.9), top_p=np.float32(0.8))
    positions = np.arange(200) + (1 << 31)
    _, expected = drawn(values, setting, Noise[noise.upper()], -7, positions)
    logits = torch.from_numpy(values).expand(200, 50)
    where = {"seeds": -7, "positions": torch.from_numpy(positions)}
    assert sample(logits, temperature=0.9, top_p=0.8, noise=noise, **where).tolist() == expected.tolist()
