"""Rows, and hints in place of the last step's positions, that are made to break a top-k."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eval.bench.hard_rows import hard_rows, levels, near_one
from gvr_topk.evaluation.paper_reference import CAPACITY


def adversarial_rows(n: int, k: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """`hard_rows`, and more kinds that might break a kernel."""
    rng = np.random.default_rng((seed, n, k))
    noise = rng.standard_normal(n)
    ascending = np.sort(noise)
    chunk = min(k, n)
    lifted_first, lifted_last = noise.copy(), noise.copy()
    lifted_first[:chunk] += 20
    lifted_last[n - chunk :] += 20

    def scattered(base: npt.NDArray[np.float64], share: float, *specials: float) -> npt.NDArray[np.float64]:
        """`base` with a share of its elements (at least one) replaced by special values."""
        where = rng.random(n) < share
        where[rng.integers(n)] = True
        return np.where(where, rng.choice(specials, n), base)

    bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    denormal_bits = rng.integers(0, 2**23, n).astype(np.uint32) | (bits & np.uint32(0x80000000))
    rows: dict[str, npt.NDArray[np.floating]] = {
        # One value, or nothing but special values.
        "all_zero": np.zeros(n),
        "all_lowest": np.full(n, np.finfo(np.float32).min),
        "all_neg_inf": np.full(n, -np.inf),
        "all_pos_inf": np.full(n, np.inf),
        "all_nan": np.full(n, np.nan),
        # NaN and infinities among ordinary values, fewer and more than k of them.
        "some_nan": scattered(noise, 0.2 * min(k / n, 1), np.nan),
        "nan_straddles_k": scattered(noise, 0.5, np.nan),
        "nan_above_inf": scattered(noise, 0.5 * min(k / n, 1), np.nan, np.inf),
        "inf_mix": scattered(noise, 0.5, np.inf, -np.inf),
        "masked_with_neg_inf": scattered(noise, 1 - 0.5 * min(k / n, 1), -np.inf),
        "every_special": scattered(
            noise, 0.5, np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38
        ),
        # Ties at the k-th value.
        "ties_beyond_capacity": levels(n, k - 1, max(CAPACITY + 1, 4 * k), rng),
        "greater_2000_equal_100": levels(n, k * 2000 / 2048, k * 100 / 2048, rng),
        "k_minus_one_greater": levels(n, k - 1, n, rng),
        "k_greater_rest_equal": levels(n, k, n, rng),
        "k_plus_one_equal": levels(n, 0, k + 1, rng),
        "few_distinct": rng.integers(-3, 4, n).astype(np.float64),
        "one_hot": np.eye(1, n, int(rng.integers(n)))[0],
        "sixteen_bit": (noise.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        "all_within_10_ulps": near_one(n, rng),
        "uniform": rng.random(n),
        # The ends of the float range.
        "denormals": denormal_bits.view(np.float32),
        "denormals_and_zero": np.maximum(denormal_bits.view(np.float32), 0),
        "signed_zeros": rng.choice(np.array([0.0, -0.0], dtype=np.float32), n),
        "signed_zeros_below_few": scattered(rng.choice([0.0, -0.0], n), 0.5 * min(k / n, 1), 1e-45, 1.0),
        "outlier_1e38": scattered(noise * 1e-30, 0.0, 1e38),
        "outliers_both_signs": scattered(noise * 1e-30, 0.1 * min(k / n, 1), 3e38, -3e38),
        "every_exponent": np.ldexp(rng.choice([-1.0, 1.0], n), rng.integers(-149, 128, n)),
        "random_bits": bits.view(np.float32),
        # Places of the largest elements.
        "ascending": ascending,
        "descending": ascending[::-1],
        "top_in_first_chunk": lifted_first,
        "top_in_last_chunk": lifted_last,
        "top_every_other": np.where(np.arange(n) % 2, noise, noise - 20),
        # Ordinary.
        "normal": noise,
        "lognormal": np.exp(2 * noise),
        "all_negative": -1 - rng.random(n),
    }
    others = {name: np.ascontiguousarray(row, dtype=np.float32) for name, row in rows.items()}
    return hard_rows(n, k, seed) | others


def adversarial_hints(n: int, k: int, seed: int) -> dict[str, npt.NDArray[np.int32]]:
    """Return worthless and senseless hints for a row of `n` elements; none may change a result."""
    rng = np.random.default_rng((seed, n, k))
    limits = np.iinfo(np.int32)
    inside = rng.integers(0, n, k)
    place = np.arange(k)
    hints: dict[str, npt.NDArray[np.integer]] = {
        "all_minus_one": np.full(k, -1),
        "all_zero": np.zeros(k, dtype=np.int32),
        "all_last": np.full(k, n - 1),
        "all_past_the_end": np.full(k, n),
        "past_the_end": n + place,
        "int32_max": np.full(k, limits.max),
        "int32_min": np.full(k, limits.min),
        "any_int32": rng.integers(limits.min, limits.max, k, endpoint=True),
        "random": inside,
        "two_positions": rng.choice([0, n - 1], k),
        "one_valid": np.where(place == 0, n // 2, -1),
        "half_padded": np.where(place < k // 2, inside, -1),
        "every_second_bad": np.where(place % 2, inside, inside + n),
        "first_k": place,
        "last_k": n - k + place,
    }
    return {name: hint.astype(np.int32) for name, hint in hints.items()}
