"""Synthetic score rows: the paper's per-layer families.

The generator stands in for captured logits in sweeps over length and hit ratio; it is no substitute
for a trace. It reproduces which families the paper fitted to each layer (appendix F) and how much
of the top-k survives a step (section 6.5); shapes, means and spreads within a family are chosen
here, because the paper prints shares of rows and not parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

STATIC_SHARE = 0.7
"""Variance share of the component that stays with a key for all steps."""

POSITION_CORRELATION = 0.9
"""Correlation of neighbouring positions: high scores come in runs, as text does."""

_Z_LIMIT = 6.5
_Z_POINTS = 4097


@dataclass(frozen=True)
class Family:
    """A distribution of `scipy.stats` with its shape parameters; location and scale belong to the layer."""

    kind: str
    shape: tuple[float, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer's scores: families with the percentage of rows each fits best, and their placement.

    The paper says only that means are negative and that layer 0 has the widest range of values (17.28).
    """

    mixture: tuple[tuple[Family, float], ...]  # published percentages; the rest is shared out in proportion
    mean: float  # of the logits
    spread: float  # their standard deviation
    correlation: float  # of a key's normal score between consecutive steps; sets the hit ratio


_LOGNORM = Family("lognorm", (0.5,))
_LOGISTIC = Family("logistic")
_T = Family("t", (5.0,))
_BETA = Family("beta", (4.0, 8.0))
_WEIBULL = Family("weibull_min", (1.8,))

LAYERS: dict[int, Layer] = {
    0: Layer(((_LOGNORM, 42.9), (_BETA, 26.0), (_WEIBULL, 31.1)), -4.0, 1.85, -0.10),
    1: Layer(((_LOGISTIC, 59.4), (_T, 40.6)), -3.0, 0.8, -0.05),
    20: Layer(((_BETA, 90.1), (_WEIBULL, 9.9)), -2.5, 1.0, 0.79),
    21: Layer(((_BETA, 99.7), (_WEIBULL, 0.2)), -2.5, 1.0, 0.80),
    22: Layer(((_WEIBULL, 63.9), (_BETA, 36.1)), -2.5, 1.0, 0.80),
    40: Layer(((_BETA, 86.1), (_LOGNORM, 5.0)), -2.0, 1.0, 0.79),
    41: Layer(((_BETA, 79.5), (_LOGNORM, 10.3)), -2.0, 1.0, 0.80),
    42: Layer(((_BETA, 63.7), (_WEIBULL, 36.4)), -2.0, 1.0, 0.80),
    60: Layer(((_WEIBULL, 93.6), (_BETA, 6.3)), -1.5, 1.0, 0.83),
}
"""The nine layers the paper profiles. Layer 0 fits three families; the third has the remaining rows."""


class LayerGenerator:
    """Consecutive decode steps of one synthetic layer; a `gvr_topk.evaluation.trace.ScoreSource`.

    Every key has a normal score ``z = sqrt(w) u + sqrt(1 - w) v``: `u` stays with the key, and `v` changes
    from step to step as a first-order autoregression. ``w`` is 0.7, and 0 in layers 0 and 1. Along the
    positions both are first-order autoregressions, too. The row is the family's quantile function at
    ``Phi(z)``, and each row draws its family. One key is appended at each step. Families are monotone, so
    they shape the search for a threshold and leave the hit ratio to the layer's correlation alone.

    Parameters
    ----------
    layer : int
        A key of `LAYERS`.
    n_start : int
        Keys at step 0.
    steps : int
        Number of decode steps.
    seed : int
        Same seed, same rows, whatever the order of the calls.

    Notes
    -----
    Measured hit ratio, hint used as it is, K/N = 2048/70690, mean of 20 steps, seed 0:

    =========  ====  ====  ====  ====  ====  ====  ====  ====  ====
    layer         0     1    20    21    22    40    41    42    60
    hit ratio  .016  .022  .447  .445  .447  .433  .442  .445  .479
    =========  ====  ====  ====  ====  ====  ====  ====  ====  ====

    The paper reports .44 for layers 20-60 together and .015 for layers 0-1.

    Positions do not move with the query here, so a hint offset other than 0 only lowers the ratio.
    SciPy is imported on construction, not with the module.
    """

    def __init__(self, layer: int, n_start: int, steps: int, seed: int = 0) -> None:
        correlation = LAYERS[layer].correlation
        self.layer = layer
        self.name = f"synthetic-L{layer:02d}"
        self.n_start = n_start
        self.seed = seed
        self.steps = steps
        self._static = min(max(correlation, 0.0), STATIC_SHARE)
        self._step_correlation = (correlation - self._static) / (1 - self._static)
        families, shares = zip(*LAYERS[layer].mixture, strict=True)
        self._tables = [_quantile_table(family) for family in families]
        self._shares = np.cumsum(shares) / np.sum(shares)
        self._fixed = self._noise(0, 0)
        self._moving_step = -1
        self._moving: Floats = np.zeros_like(self._fixed)

    def length(self, step: int) -> int:
        """Number of keys at decode step `step`: one more than at the step before."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step: wanted 0 <= step < {self.steps}, got {step}")
        return self.n_start + step

    def scores(self, step: int) -> Floats:
        """Scores of one decode step, shape ``[length(step)]``, float32.

        Steps in ascending order cost one pass each; going back starts over from step 0.
        """
        n = self.length(step)
        self._advance(step)
        z = np.sqrt(np.float32(self._static)) * self._fixed[:n]
        z += np.sqrt(np.float32(1 - self._static)) * self._moving[:n]
        pick = np.random.default_rng((self.seed, self.layer, 2, step)).random()
        table = self._tables[int(np.searchsorted(self._shares, pick))]
        layer = LAYERS[self.layer]
        return (layer.mean + layer.spread * np.interp(z, *table)).astype(np.float32)

    def _advance(self, step: int) -> None:
        if step < self._moving_step:
            self._moving_step = -1
        keep = np.float32(self._step_correlation)
        fresh = np.sqrt(np.float32(1) - keep * keep)
        for at in range(self._moving_step + 1, step + 1):
            noise = self._noise(1, at)
            self._moving = noise if at == 0 else keep * self._moving + fresh * noise
        self._moving_step = step

    def _noise(self, stream: int, step: int) -> Floats:
        """Standard normal scores of all keys that will ever exist, autoregressive in position."""
        from scipy.signal import lfilter

        rng = np.random.default_rng((self.seed, self.layer, stream, step))
        shocks = rng.standard_normal(self.n_start + self.steps - 1, dtype=np.float32)
        gain = np.float32((1 - POSITION_CORRELATION**2) ** 0.5)
        shocks[0] /= gain  # the first position has no neighbour before it, but unit variance, too
        return lfilter(
            np.array([gain]), np.array([1, -POSITION_CORRELATION], dtype=np.float32), shocks
        ).astype(np.float32, copy=False)


@cache
def _quantile_table(family: Family) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Normal scores and the family's values there, scaled to mean 0 and standard deviation 1.

    A table, because a quantile function per element costs a hundred times the interpolation. Upper
    tails come from the survival function: ``Phi(z)`` rounds to 1 where the top-k lies.
    """
    from scipy import special, stats

    z = np.linspace(-_Z_LIMIT, _Z_LIMIT, _Z_POINTS)
    law = getattr(stats, family.kind)(*family.shape)
    values = np.where(z < 0, law.ppf(special.ndtr(z)), law.isf(special.ndtr(-z)))
    density = np.exp(-0.5 * z * z)
    density /= density.sum()
    mean = density @ values
    return z, (values - mean) / np.sqrt(density @ (values - mean) ** 2)
