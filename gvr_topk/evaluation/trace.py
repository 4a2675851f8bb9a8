"""Decode traces: the indexer tensors of consecutive decode steps, and the score rows they give."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

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
    """A trace file that cannot be used: names the file, the array, what was wanted and what was got."""

    def __init__(self, path: Path | str, array: str | None, wanted: str, got: str) -> None:
        where = f"{path}: array {array!r}" if array else f"{path}"
        super().__init__(f"{where}: wanted {wanted}, got {got}")
        self.path = Path(path)
        self.array = array
        self.wanted = wanted
        self.got = got


@runtime_checkable
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
    _keys: npt.NDArray[np.float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Every step multiplies by all keys, so they are widened once and not once a step.
        object.__setattr__(self, "_keys", np.ascontiguousarray(self.K, dtype=np.float32))

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
    if not path.is_file():
        raise TraceError(path, None, "an .npz trace file", "a directory" if path.is_dir() else "no such file")
    # A truncated archive loses its directory, which stands at the end: only the first bytes tell it
    # from a file of another kind.
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise TraceError(path, None, "an .npz (zip) archive", "a file of another kind")
    try:
        archive = np.load(path, allow_pickle=False)
    except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        raise TraceError(
            path, None, "a whole .npz archive", f"a truncated or damaged file ({error})"
        ) from error
    with archive:
        arrays = {array: _read_array(path, archive, array) for array in _LAYOUT}
    _check_shapes(path, arrays)
    for array, values in arrays.items():
        bad = int(values.size - np.count_nonzero(np.isfinite(values)))
        if bad:
            raise TraceError(path, array, "finite values", f"{bad} values that are NaN or infinite")
    return Trace(K=arrays["K"], Q=arrays["Q"], W=arrays["W"], name=path.stem, path=path)


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
        where = (
            "none, and the wheel holds no trace: run this in the folder of a checkout, or give --trace FILE "
            "or --generator LAYER"
        )
        raise TraceError(_IN_CHECKOUT, None, "the trace of a checkout", where)
    return load_trace(found)


def _read_array(path: Path, archive: np.lib.npyio.NpzFile, array: str) -> npt.NDArray[np.floating]:
    if array not in archive.files:
        held = ", ".join(sorted(archive.files)) or "nothing"
        raise TraceError(
            path, array, f"an array of that name beside {_others(array)}", f"an archive of {held}"
        )
    try:
        values = archive[array]
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, MemoryError) as error:
        raise TraceError(path, array, "readable data", f"truncated or damaged data ({error})") from error
    wanted = _LAYOUT[array]
    if values.ndim != len(wanted):
        raise TraceError(
            path, array, f"{len(wanted)} dimensions [{', '.join(wanted)}]", f"shape {values.shape}"
        )
    if values.dtype.name not in _FLOAT_DTYPES:
        raise TraceError(path, array, "dtype " + " or ".join(_FLOAT_DTYPES), f"{values.dtype}")
    if not values.size:
        raise TraceError(path, array, "at least one element", f"shape {values.shape}")
    return values


def _check_shapes(path: Path, arrays: dict[str, npt.NDArray[np.floating]]) -> None:
    keys, head_dim = arrays["K"].shape
    steps, heads, _ = arrays["Q"].shape
    if arrays["Q"].shape[2] != head_dim:
        raise TraceError(
            path, "Q", f"head_dim {head_dim} as in K {arrays['K'].shape}", f"shape {arrays['Q'].shape}"
        )
    if arrays["W"].shape != (steps, heads):
        raise TraceError(path, "W", f"shape {(steps, heads)} as in Q", f"shape {arrays['W'].shape}")
    if keys < steps:
        raise TraceError(path, "K", f"at least as many keys as steps ({steps})", f"shape {arrays['K'].shape}")


def _others(array: str) -> str:
    return " and ".join(sorted(set(_LAYOUT) - {array}))
