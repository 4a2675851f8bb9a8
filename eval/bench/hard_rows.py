"""Rows that have broken top-k kernels: ties at the k-th place, and values that share leading digits."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


def levels(n: int, greater: float, equal: float, rng: np.random.Generator) -> Floats:
    """`greater` elements above a plateau of `equal` zeros, the rest below it, in any order."""
    above = min(n, round(greater))
    ties = min(n - above, round(equal))
    row = -1 - rng.random(n)
    row[:above] = 1 + rng.random(above)
    row[above : above + ties] = 0
    return rng.permutation(row)


def near_one(n: int, rng: np.random.Generator) -> Floats:
    """Numbers within 10 units in the last place of 1."""
    return (np.float32(1).view(np.uint32) + rng.integers(0, 10, n)).astype(np.uint32).view(np.float32)


def hard_rows(n: int, k: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Rows of `n` elements by their kind; the same for the same seed."""
    rng = np.random.default_rng((seed, n, k))
    crowd = min(n // 2, 100_000)
    ordinary = rng.standard_normal(n - crowd) - 8
    rows: dict[str, Floats] = {
        "constant": np.full(n, 1.5),
        "two_valued": levels(n, k // 2, n, rng),
        "crowd_within_10_ulps": rng.permutation(np.concatenate([near_one(crowd, rng), ordinary])),
        "uniform_128_6_to_128_7": rng.uniform(128.6, 128.7, n),
        "relu_zero_plateau": np.maximum(levels(n, k // 2, n, rng), 0) * rng.random(n),
        "zero_plateau_between": levels(n, k / 2, k, rng),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}
