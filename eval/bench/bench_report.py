"""What the kernel benchmark's JSON says: its layout, limits and what was reached, ratios, tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table

from eval.bench.bench_blocks import GROUP as BLOCKS_GROUP
from eval.bench.our_kernels import (
    BLOCKS,
    HINTED,
    IN_BLOCKS,
    NO_HINT,
    NO_ROW_SLOT,
    PAPER,
    PDL,
    PREFILL,
    PREFILL_ROUNDS,
    RADIX_ROUNDS,
    WITH_INDICES,
)

FORMAT = "gvr_topk.bench_kernels/3"

Cell = Mapping[str, Any]
Results = Mapping[str, Any]
Check = dict[str, Any]

PREFILL_ALONE = (PREFILL, PREFILL_ROUNDS, "trtllm_prefill", "vllm_prefill")
"""Implementations that are measured on chunks of a prefill alone."""
PREFILL_IMPLS = (
    PREFILL,
    PREFILL_ROUNDS,
    NO_HINT,
    "torch",
    "trtllm_prefill",
    "vllm_prefill",
    "flashinfer_ragged",
    "flashinfer_deterministic",
)
"""Those that are measured on chunks of a prefill: ops for it, and decode ops that take a length for each row.
FlashInfer's `top_k` takes none, and other projects' decode kernels are not made for so many rows."""
BLOCKS_ALONE = (BLOCKS, IN_BLOCKS, "torch_blocks", "torch_in_blocks")
"""Those that are measured on the two-level indexer alone, where nothing else is."""
OURS = (
    HINTED,
    NO_HINT,
    RADIX_ROUNDS,
    NO_ROW_SLOT,
    WITH_INDICES,
    PDL,
    PAPER,
    PREFILL,
    PREFILL_ROUNDS,
    BLOCKS,
    IN_BLOCKS,
)
BASELINES = (
    "torch",
    "trtllm",
    "vllm",
    "vllm_per_row",
    "flashinfer",
    "flashinfer_ragged",
    "flashinfer_deterministic",
    "cudnn",
    "trtllm_prefill",
    "vllm_prefill",
    "torch_blocks",
    "torch_in_blocks",
)
ALL = (*OURS, *BASELINES)
REFERENCES = (HINTED, PREFILL, BLOCKS)
"""This package's default in each kind of cell, whose run the other figures of the cell must be of."""
FLOOR = "read_floor"
"""Reading the rows and nothing else."""

LIMITS: dict[tuple[int, int], float] = {
    (8192, 1): 3.5,
    (32768, 1): 4.5,
    (70690, 1): 4.8,
    (131072, 1): 5.1,
    (1048576, 1): 9.2,
    (8192, 64): 4.5,
    (131072, 64): 14.8,
}
"""Microseconds at most at (N, batch): Gaussian chain, fp32, k = 2048, called as integrations call it."""

PREFILL_LIMITS: dict[tuple[int, int], float] = {
    (8192, 8192): 75.0,
    (32768, 2048): 85.0,
    (32768, 8192): 310.0,
    (131072, 2048): 280.0,
    (131072, 8192): 1080.0,
}
"""Microseconds at most at (columns, rows): causal Gaussian chunk of one request, fp32, k = 2048."""

TRACE_US = 5.3
LAYERS_MEAN_US, LAYERS_WORST_US = 5.5, 6.0
HINT_COST = 1.02
"""Time with a hint over time without, at most, in any cell of rows that do not change at random."""
MASK_COST = 2.0
ADVERSARIAL_COST = 3.0
"""Time of hard rows over the usual time of their shape, at most."""
CHANGING_GROUPS = ("scale", "engine")
"""Groups whose rows change so that a hint cannot help."""
CHANGING_MEAN, CHANGING_WORST = 1.25, 1.5
"""Time with a hint over time without where it cannot help: in the mean, and of the worst launch."""
PAPER_SPEEDUP = 1.9
PAPER_LENGTHS = (16384, 262144)
NO_HINT_BATCHES = (1, 8, 64)
NO_HINT_SPEEDUP_LONGEST = 3.0


class Index:
    """Results by cell and implementation.

    A file may hold several runs. Two machines of one kind differ by more than most changes, so a figure of
    another run than this package's own at the same cell is left out: no ratio crosses runs.

    Parameters
    ----------
    data : dict
        Content of a result file: ``cells`` by key, and ``results``.

    Attributes
    ----------
    results : list
        Results that are not left out.
    left_out : int
        Measured figures that are.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        own = {
            result["cell"]: result.get("run", 0)
            for result in data["results"]
            if result["impl"] in REFERENCES and result["cold_us"] is not None
        }
        beside = [
            result
            for result in data["results"]
            if result.get("run", 0) == own.get(result["cell"], result.get("run", 0))
        ]
        measured = [result for result in data["results"] if result["cold_us"] is not None]
        self.results: list[Results] = beside
        self.left_out = len(measured) - sum(result["cold_us"] is not None for result in beside)
        self._cells: dict[str, Cell] = {key: {"key": key, **cell} for key, cell in data["cells"].items()}
        self._results = {(result["cell"], result["impl"]): result for result in self.results}

    def figure(self, key: str, impl: str, name: str = "cold_us") -> float | None:
        """A figure of a result, or None where it was not measured or the result was not exact."""
        result = self._results.get((key, impl))
        if result is None or result.get(name) is None or result["exact"] is False:
            return None
        return float(result[name])

    def wrong(self, impl: str) -> int:
        """Cells at which an implementation's answer was wrong."""
        return sum(result["impl"] == impl and result["exact"] is False for result in self.results)

    def entry(self, key: str, impl: str) -> str:
        """A table's entry: the time, with a star where the answer was wrong."""
        result = self._results.get((key, impl))
        if result is None or result["cold_us"] is None:
            return "-"
        return f"{result['cold_us']:.2f}" + ("*" if result["exact"] is False else "")

    def cells(self, keep: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
        """Cells with results, in their order."""
        return [cell for cell in self._cells.values() if keep(cell)]

    def group(self, *names: str) -> list[Cell]:
        """Cells of some groups."""
        return self.cells(lambda cell: cell["group"] in names)

    def main(self, n: int, batch: int) -> str:
        """Key of a shape's cell in the main sweep; empty if there is none."""
        return next((c["key"] for c in self.group("main") if (c["n"], c["batch"]) == (n, batch)), "")

    def causal(self, n: int, rows: int) -> str:
        """Key of a Gaussian chunk of a prefill; empty if there is none."""
        shape = (n, rows, "causal")
        return next((c["key"] for c in self.group("prefill") if (c["n"], c["batch"], c["rows"]) == shape), "")

    def ratios(
        self, upper: str, lower: str, keep: Callable[[Cell], bool] = lambda cell: True
    ) -> dict[str, float]:
        """Time of one implementation over another's at every cell that has both."""
        ratios = {}
        for cell in self.cells(keep):
            above, below = self.figure(cell["key"], upper), self.figure(cell["key"], lower)
            if above and below:
                ratios[cell["key"]] = above / below
        return ratios


def measured_in(impl: str, group: str) -> bool:
    """Whether an implementation belongs into a group; prefill and the two-level indexer have their own."""
    if group == BLOCKS_GROUP:
        return impl in BLOCKS_ALONE
    return impl in PREFILL_IMPLS if group == "prefill" else impl not in PREFILL_ALONE + BLOCKS_ALONE


def dump(data: Mapping[str, Any]) -> str:
    """Strict JSON text of a result file, with one cell, result or check on a line."""

    def line(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    parts = []
    for name, value in data.items():
        if isinstance(value, Mapping):
            inside = ",\n".join(f"  {line(key)}: {line(entry)}" for key, entry in value.items())
            parts.append(f" {line(name)}: {{\n{inside}\n }}" if value else f" {line(name)}: {{}}")
        elif isinstance(value, list):
            inside = ",\n".join(f"  {line(entry)}" for entry in value)
            parts.append(f" {line(name)}: [\n{inside}\n ]" if value else f" {line(name)}: []")
        else:
            parts.append(f" {line(name)}: {line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def geometric_mean(values: Iterable[float]) -> float:
    """Mean of ratios that treats 2 and 1/2 alike."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def worst_ratios(index: Index, ours: str = HINTED) -> list[Check]:
    """For each other implementation, its time over the time of `ours`: worst cell, and mean.

    Cells of every group count. Where the other's answer is wrong its time is not compared; `wrong` says
    how often that was.
    """
    rows = []
    for other in (NO_HINT, RADIX_ROUNDS, PAPER, *BASELINES):
        ratios = index.ratios(other, ours)
        if ratios:
            worst = min(ratios, key=lambda key: ratios[key])
            rows.append(
                {
                    "other": other,
                    "ratio": round(ratios[worst], 4),
                    "cell": worst,
                    "cells": len(ratios),
                    "wrong": index.wrong(other),
                    "geometric_mean": round(geometric_mean(ratios.values()), 4),
                }
            )
    return rows


def hint_ratios(index: Index) -> list[Check]:
    """Time with a hint over time without, of every cell, and the same with less or more given than usual."""
    rows = []
    for cell in index.cells():
        key = cell["key"]
        without, given = index.figure(key, NO_HINT), index.figure(key, HINTED)
        if without is None or given is None:
            continue
        row = {"cell": key, "with_us": given, "without_us": without, "ratio": round(given / without, 4)}
        for impl in (NO_ROW_SLOT, WITH_INDICES):
            other = index.figure(key, impl)
            if other is not None:
                row[impl] = round(other / without, 4)
        rows.append(row)
    return rows


def hard_rows(index: Index, group: str, impl: str = HINTED) -> dict[str, float]:
    """Time at each cell of a group over the time of the main sweep's cell of the same shape."""
    found = {}
    for cell in index.group(group):
        hard = index.figure(cell["key"], impl)
        usual = index.figure(index.main(cell["n"], cell["batch"]), impl)
        if hard and usual:
            found[cell["key"]] = hard / usual
    return found


def worst_launch(index: Index, key: str) -> float | None:
    """Worst launch with a hint over the mean launch without one."""
    worst, without = index.figure(key, HINTED, "worst_us"), index.figure(key, NO_HINT)
    return worst / without if worst and without else None


def checks(index: Index) -> list[Check]:
    """Every limit beside what was reached; `met` is None where nothing was measured."""
    found = []
    for (n, batch), limit in LIMITS.items():
        reached = index.figure(index.main(n, batch), HINTED)
        found.append(_check(f"us at N = {n:,}, batch {batch}, fresh Gaussian chain", limit, reached))
    for (n, rows), limit in PREFILL_LIMITS.items():
        reached = index.figure(index.causal(n, rows), PREFILL)
        found.append(_check(f"us, causal chunk of {rows:,} rows, {n:,} columns", limit, reached))
    traces = index.group("trace")
    found += [_check(f"us, {cell['rows']}", TRACE_US, index.figure(cell["key"], HINTED)) for cell in traces]
    if not traces:
        found.append(_check("us, real traces", TRACE_US, None))
    layers = _figures(index, index.group("layer"))
    mean = sum(layers.values()) / len(layers) if layers else None
    found.append(_check("us, the paper's layers, N = 70,690, mean", LAYERS_MEAN_US, mean))
    found.append(_most("us, the paper's layers, N = 70,690, slowest", LAYERS_WORST_US, layers))

    steady = lambda cell: cell["group"] not in CHANGING_GROUPS  # noqa: E731
    for impl, what in ((HINTED, "hint as integrations give it"), (WITH_INDICES, "positions kept beside it")):
        ratios = index.ratios(impl, NO_HINT, steady)
        found.append(_most(f"time with over without a hint ({what}), any cell", HINT_COST, ratios))
    for impl, what in ((HINTED, "with a hint"), (NO_HINT, "without a hint")):
        masked = hard_rows(index, "mask", impl)
        found.append(_most(f"masked over usual rows of the shape, {what}", MASK_COST, masked))
    hard = hard_rows(index, "adversarial")
    found.append(_most("adversarial over usual rows of the shape", ADVERSARIAL_COST, hard))
    for group in CHANGING_GROUPS:
        cells = index.group(group)
        ratios = index.ratios(HINTED, NO_HINT, lambda cell, group=group: cell["group"] == group)  # type: ignore[misc]
        found.append(_most(f"{group} rows: time with over without a hint", CHANGING_MEAN, ratios))
        worst = {cell["key"]: ratio for cell in cells if (ratio := worst_launch(index, cell["key"]))}
        what = f"{group} rows: worst launch of 1,000 with over mean launch without a hint"
        found.append(_most(what, CHANGING_WORST, worst))

    of_layers = index.ratios("trtllm", PAPER, lambda cell: cell["group"] == "layer")
    mean = geometric_mean(of_layers.values()) if of_layers else None
    what = "paper's kernel: speedup over trtllm, the paper's layers, mean"
    found.append(_check(what, PAPER_SPEEDUP, mean, "at least"))
    inside = index.ratios("trtllm", PAPER, _paper_lengths)
    found.append(_least("paper's kernel: speedup over trtllm, N = 16,384 to 262,144, batch 1", 1, inside))
    batches = ", ".join(map(str, NO_HINT_BATCHES))
    every = index.ratios(
        "trtllm", NO_HINT, lambda cell: cell["group"] == "main" and cell["batch"] in NO_HINT_BATCHES
    )
    found.append(_least(f"no hint: speedup over trtllm, every N, batch {batches}", 1.0, every))
    longest = index.ratios("trtllm", NO_HINT, lambda cell: _single(cell) and cell["n"] == 1048576)
    what = "no hint: speedup over trtllm, N = 1,048,576, batch 1"
    found.append(_least(what, NO_HINT_SPEEDUP_LONGEST, longest))
    return found


def _single(cell: Cell) -> bool:
    return bool(cell["group"] == "main" and cell["batch"] == 1)


def _paper_lengths(cell: Cell) -> bool:
    low, high = PAPER_LENGTHS
    return _single(cell) and low <= cell["n"] <= high


def _figures(index: Index, cells: Sequence[Cell], impl: str = HINTED) -> dict[str, float]:
    times = {cell["key"]: index.figure(cell["key"], impl) for cell in cells}
    return {key: time for key, time in times.items() if time is not None}


def _check(what: str, limit: float, reached: float | None, sense: str = "at most", where: str = "") -> Check:
    met = None
    if reached is not None:
        met = reached <= limit if sense == "at most" else reached >= limit
        reached = round(reached, 4)
    return {"what": what, "sense": sense, "limit": limit, "reached": reached, "met": met, "where": where}


def _most(what: str, limit: float, figures: Mapping[str, float]) -> Check:
    worst = max(figures, key=lambda key: figures[key]) if figures else ""
    return _check(what, limit, figures.get(worst), "at most", worst)


def _least(what: str, limit: float, figures: Mapping[str, float]) -> Check:
    worst = min(figures, key=lambda key: figures[key]) if figures else ""
    return _check(what, limit, figures.get(worst), "at least", worst)


def times_tables(index: Index, group: str) -> list[Table]:
    """Microseconds of every implementation at the cells of one group: ours, then others, in 80 columns."""
    cells = index.group(group)
    tables = []
    for whose, of in (("this package", OURS), ("others", (*BASELINES, FLOOR))):
        impls = [impl for impl in of if any(index.entry(cell["key"], impl) != "-" for cell in cells)]
        if not impls:
            continue
        table = Table(box=box.SIMPLE, title=f"{group}, {whose}: us per launch, cold L2; * = not exact")
        table.add_column("cell", overflow="fold")
        for impl in impls:
            # Names break at underscores, so that figures have room.
            table.add_column(impl.replace("_", "_\n"), justify="right", no_wrap=True)
        for cell in cells:
            table.add_row(_short(cell), *(index.entry(cell["key"], impl) for impl in impls))
        tables.append(table)
    return tables


def _short(cell: Cell) -> str:
    if cell["group"] == "main":
        return f"{cell['n']:,} x {cell['batch']}"
    return str(cell["key"])


def ratios_table(rows: Sequence[Check], ours: str = HINTED) -> Table:
    """What `worst_ratios` found."""
    table = Table(box=box.SIMPLE, title=f"time of the other over time of {ours}: worst cell of all, and mean")
    for name in ("other", "worst", "at cell", "mean", "cells", "wrong"):
        table.add_column(name, justify="left" if name in ("other", "at cell") else "right")
    for row in rows:
        table.add_row(
            row["other"],
            f"{row['ratio']:.2f}",
            row["cell"],
            f"{row['geometric_mean']:.2f}",
            str(row["cells"]),
            str(row["wrong"]),
        )
    return table


def hint_table(index: Index) -> Table:
    """What a hint costs or saves in every cell, how often it was good at once, and the worst launches."""
    table = Table(
        box=box.SIMPLE,
        title="time over time without a hint; guesses good at once; worst launch, us (with, without)",
    )
    names = ("cell", "hint", "no row_slot", "with indices", "hit ratio", "good guesses", "passes", "worst")
    for name in names:
        justify: Literal["left", "right"] = "left" if name == "cell" else "right"
        table.add_column(name.replace(" ", "\n"), justify=justify, overflow="fold")
    for row in hint_ratios(index):
        key = row["cell"]
        figures = [row.get(name) for name in ("ratio", NO_ROW_SLOT, WITH_INDICES)]
        cell = next(cell for cell in index.cells() if cell["key"] == key)
        figures += [cell.get("hit_ratio")]
        figures += [index.figure(key, HINTED, name) for name in ("guess_hit", "passes")]
        worst = [index.figure(key, impl, "worst_us") for impl in (HINTED, NO_HINT)]
        shown = ["-" if figure is None else f"{figure:.2f}" for figure in (*figures, *worst)]
        table.add_row(key, *shown[:-2], "" if worst[0] is None else f"{shown[-2]}, {shown[-1]}")
    return table


def checks_table(rows: Sequence[Check]) -> Table:
    """Every limit beside what was reached."""
    table = Table(
        box=box.SIMPLE,
        title="targets of the project (eval/bench/bench_report.py) and what was reached, cold L2",
    )
    for name in ("what", "target", "reached", "met", "where"):
        table.add_column(name, justify="right" if name in ("target", "reached") else "left")
    for row in rows:
        sign = "<=" if row["sense"] == "at most" else ">="
        reached = "not measured" if row["reached"] is None else f"{row['reached']:.2f}"
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        table.add_row(row["what"], f"{sign} {row['limit']:g}", reached, met, row["where"])
    return table
