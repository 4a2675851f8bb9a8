"""What the kernel benchmark measures: shapes, kinds of rows and hints, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from eval.kernel_timing import Rows, correlated_rows, rows_from_pairs
from gvr_topk.synthetic import LAYERS, LayerGenerator, adversarial_rows
from gvr_topk.trace import ScoreSource, load_trace, shipped_trace

Hint = Literal["previous", "none"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (4096, 8192, 16384, 32768, 70690, 131072, 262144, 524288, 1048576)
BATCHES = (1, 8, 64, 128)
K = 2048

KEEP = 0.9
"""Variance that survives a step in the main sweep: about 60 % of the top-k at N = 70,690."""

ADVERSARIAL = (
    "constant",
    "two_valued",
    "crowd_within_10_ulps",
    "uniform_128_6_to_128_7",
    "relu_zero_plateau",
    "zero_plateau_between",
)
"""Names in `gvr_topk.synthetic.adversarial_rows`."""

PAIRS = 12
"""Distinct pairs of steps taken of a generator or a trace; they are repeated over the buffers."""


@dataclass(frozen=True)
class Cell:
    """One point of the benchmark.

    Attributes
    ----------
    group : str
        Part of the benchmark: main, dtype, k, hint, layer, trace or adversarial.
    n, batch, k : int
        Row length, rows per launch, items per row.
    dtype : str
        A key of `DTYPES`.
    rows : str
        ``gauss`` and ``relu`` (pairs of correlated rows), ``layer:20`` (generator), ``trace:NAME``,
        ``adversarial:NAME``.
    keep : float
        Share of variance that survives a step, for ``gauss`` and ``relu``.
    hint : str
        ``previous`` (the step before) or ``none``.
    shift : int
        Positions by which scores move from step to step, and the hint's offset.
    """

    group: str
    n: int
    batch: int = 1
    k: int = K
    dtype: str = "fp32"
    rows: str = "gauss"
    keep: float = KEEP
    hint: Hint = "previous"
    shift: int = 0

    @property
    def key(self) -> str:
        """Every field but the group, as text: ``n70690 b1 k2048 fp32 gauss keep0.9 previous``."""
        kind = f"{self.rows} keep{self.keep:g}" if self.rows in ("gauss", "relu") else self.rows
        shifted = f" shift{self.shift}" if self.shift else ""
        return f"n{self.n} b{self.batch} k{self.k} {self.dtype} {kind} {self.hint}{shifted}"

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, **asdict(self)}


def all_cells(traces: Sequence[ScoreSource] = ()) -> list[Cell]:
    """Every cell, the most wanted first, each shape once."""
    cells = [Cell("main", n, batch) for batch in BATCHES for n in LENGTHS]
    for batch in (1, 64):
        cells += [Cell("hint", 70690, batch, keep=keep) for keep in (0.0, 0.5, 0.99)]
        cells += [Cell("hint", 70690, batch, shift=1), Cell("hint", 70690, batch, hint="none")]
    cells += [Cell("hint", n, hint="none") for n in (8192, 131072, 1048576)]
    cells += [Cell("adversarial", 131072, rows=f"adversarial:{name}") for name in ADVERSARIAL]
    cells += [Cell("layer", 70690, rows=f"layer:{layer}") for layer in LAYERS]
    cells += [Cell("trace", max(1, trace.length(0)), rows=f"trace:{trace.name}") for trace in traces]
    for batch in (1, 64):
        cells += [Cell("k", n, batch, k) for k in (512, 1024) for n in (8192, 70690, 262144)]
        cells += [
            Cell("dtype", n, batch, dtype=dtype) for dtype in ("bf16", "fp16") for n in (8192, 70690, 262144)
        ]
    return cells


def make_rows(cell: Cell, traces: Sequence[ScoreSource] = (), seed: int = 0) -> Rows:
    """Rows of a cell on the GPU, as many as a cold graph needs.

    Raises
    ------
    ValueError
        The cell names a trace that was not given, or a kind of rows that does not exist.
    """
    dtype = DTYPES[cell.dtype]
    if cell.rows in ("gauss", "relu"):
        return correlated_rows(
            cell.n,
            cell.batch,
            cell.k,
            keep=cell.keep,
            dtype=dtype,
            cold=True,
            seed=seed,
            relu=cell.rows == "relu",
            shift=cell.shift,
        )
    kind, _, name = cell.rows.partition(":")
    if kind == "adversarial":
        pairs = [
            (adversarial_rows(cell.n, cell.k, at)[name], adversarial_rows(cell.n, cell.k, at + 1)[name])
            for at in (seed, seed + 2)
        ]
    elif kind == "layer":
        # One key is appended at each step: the lengths end at the cell's own.
        pairs = step_pairs(LayerGenerator(int(name), cell.n - 2 * PAIRS + 1, 2 * PAIRS, seed))
    elif kind == "trace":
        sources = {source.name: source for source in traces}
        if name not in sources:
            raise ValueError(f"rows: wanted one of the traces {sorted(sources)}, got {name!r}")
        pairs = step_pairs(sources[name])
    else:
        raise ValueError(
            f"rows: wanted gauss, relu, layer:L, trace:NAME or adversarial:NAME, got {cell.rows!r}"
        )
    return rows_from_pairs(pairs, cell.batch, cell.k, dtype=dtype, cold=True)


def step_pairs(source: ScoreSource) -> list[Any]:
    """Pairs of consecutive steps, spread evenly over the source."""
    stride = max(2, source.steps // PAIRS)
    firsts = range(0, source.steps - 1, stride)
    return [(source.scores(at), source.scores(at + 1)) for at in firsts][:PAIRS]


def load_traces(folder: Path | None) -> list[ScoreSource]:
    """The shipped trace and those of a folder."""
    if folder is None:
        return []
    shipped = shipped_trace()
    return [
        shipped,
        *(load_trace(path) for path in sorted(folder.glob("*.npz")) if path.stem != shipped.name),
    ]
