"""Decode traces: the indexer tensors of consecutive decode steps, and the score rows they give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

_IN_CHECKOUT = Path("eval", "data", "smollm2_dsaidx_L10_32k.npz")
SHIPPED_TRACE = Path(__file__).resolve().parents[2] / _IN_CHECKOUT
"""Where the checkout that this package is imported from holds the trace."""

_FLOAT_DTYPES = ("float16", "float32")
_LAYOUT = {
    "K": ("keys", "head_dim"),
    "Q": ("steps", "heads", "head_dim"),
    "W": ("steps", "heads"),
}


class TraceError(ValueError):
    """A trace file that cannot be used; the message says what was wanted and what was got."""


class ScoreSource(Protocol):
    """Consecutive decode steps of one layer, each a row of scores.

    Both a captured :class:`Trace` and a synthetic generator satisfy it, so a replay takes either.
    """

    @property
    def name(self) -> str:
        """Short label for reports."""

    @property
    def steps(self) -> int:
        """Number of decode steps."""

    def length(self, step: int) -> int:
        """Number of keys that step `step` sees."""

    def scores(self, step: int) -> npt.NDArray[np.float32]:
        """Scores of step `step`, shape ``[length(step)]``, float32."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Indexer tensors of `steps` consecutive decode steps over one growing key cache, float16 or float32."""

    K: npt.NDArray[np.floating]  # ``[keys, head_dim]``: indexer key of each position
    Q: npt.NDArray[np.floating]  # ``[steps, heads, head_dim]``: indexer query heads of each decode step
    W: npt.NDArray[np.floating]  # ``[steps, heads]``: weight of each head at each decode step
    name: str  # short label for reports (the file's stem)
    path: Path  # where the arrays came from

    @cached_property
    def _keys(self) -> npt.NDArray[np.float32]:
        # Every step multiplies by all keys, so they are widened once and not once a step.
        return np.ascontiguousarray(self.K, dtype=np.float32)

    @property
    def steps(self) -> int:
        """Number of decode steps."""
        return self.Q.shape[0]

    def length(self, step: int) -> int:
        """Number of keys that decode step `step` sees: the last step sees all, each earlier one less."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step: wanted 0 <= step < {self.steps}, got {step}")
        return self.K.shape[0] - self.steps + step + 1

    def scores(self, step: int) -> npt.NDArray[np.float32]:
        """Indexer scores of one decode step (paper section 2.1, equation 1).

        ``x[s] = sum_h W[step, h] * relu(Q[step, h] . K[s]) / sqrt(head_dim)``, every product and sum in
        float32. The order of summation is the matrix library's, so the last bits may differ between
        machines; on one machine the row is the same on every call.
        """
        n = self.length(step)
        heads = self.Q[step].astype(np.float32) @ self._keys[:n].T
        np.maximum(heads, 0.0, out=heads)
        weights = self.W[step].astype(np.float32) * np.float32(self.Q.shape[2] ** -0.5)
        return weights @ heads


def load_trace(path: str | Path) -> Trace:
    """Read and check a trace file.

    It is an ``.npz`` archive with the arrays of a `Trace`, finite, with at least as many keys as steps.

    Raises
    ------
    TraceError
        The file is missing, is not such an archive, is damaged, or an array is absent or unfit.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {array: archive[array] for array in _LAYOUT}
    except Exception as error:  # another kind of file, and damage, show up in many ways
        wanted = f"an .npz file with the arrays {', '.join(_LAYOUT)}"
        raise TraceError(f"{path}: wanted {wanted}, got {type(error).__name__}: {error}") from None
    sizes: dict[str, int] = {}
    for array, values in arrays.items():
        axes = _LAYOUT[array]
        if values.dtype.name not in _FLOAT_DTYPES:
            wanted, got = " or ".join(_FLOAT_DTYPES), str(values.dtype)
        elif values.ndim != len(axes) or not values.size:
            wanted, got = f"elements [{', '.join(axes)}]", f"shape {values.shape}"
        elif any(sizes.setdefault(axis, size) != size for axis, size in zip(axes, values.shape, strict=True)):
            wanted, got = f"the sizes {sizes} of the arrays before", f"shape {values.shape}"
        elif bad := int(values.size - np.count_nonzero(np.isfinite(values))):
            wanted, got = "finite values", f"{bad} values that are NaN or infinite"
        else:
            continue
        raise TraceError(f"{path}: array {array}: wanted {wanted}, got {got}")
    if sizes["keys"] < sizes["steps"]:
        raise TraceError(f"{path}: array K: wanted a key for each of the {sizes['steps']} steps, got fewer")
    return Trace(**arrays, name=path.stem, path=path)


def shipped_trace() -> Trace:
    """The trace that a checkout ships: layer 10 of SmolLM2-135M, 32,768 keys, 256 decode steps.

    Its rows are real scores of SmolLM2 under a distilled DSA-style indexer, not of DeepSeek;
    ``eval/data/PROVENANCE.md`` tells how they were made. The trace is no part of the wheel, so it is also
    looked for in the current folder.

    Raises
    ------
    TraceError
        Neither the package nor the current folder is that of a checkout.
    """
    found = next((path for path in (SHIPPED_TRACE, _IN_CHECKOUT) if path.is_file()), None)
    if found is None:
        raise TraceError(
            f"{_IN_CHECKOUT}: wanted the trace of a checkout, got none, and the wheel holds no trace: run "
            "this in the folder of a checkout, or give --trace FILE or --generator LAYER"
        )
    return load_trace(found)
