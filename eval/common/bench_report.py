"""What the kernel benchmark's JSON says: worst ratios, wanted and reached times, tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table

Results = Mapping[str, Any]
Check = dict[str, Any]

EARLY = "cluster_pdl"
"""The same kernels, launched while the kernel before is still running (programmatic dependent launch)."""
OURS = ("cluster", EARLY, "gvr_mean", "gvr_quantile", "radix")
BASELINES = ("torch", "trtllm", "vllm", "vllm_per_row", "flashinfer")
ALL = (*OURS, *BASELINES)
FLOOR = "read_floor"
"""Reading the rows and nothing else."""

TARGETS: dict[tuple[int, int], float] = {
    (8192, 1): 3.5,
    (8192, 64): 4.5,
    (32768, 1): 4.5,
    (70690, 1): 5.0,
    (131072, 1): 5.5,
    (262144, 1): 6.5,
    (1048576, 1): 9.0,
    (131072, 8): 7.5,
    (131072, 64): 15.0,
    (1048576, 64): 70.0,
}
"""Microseconds wanted at (N, batch): fp32, k = 2048, cold L2, hint of the step before."""

HINT_SPREAD = 1.3
ADVERSARIAL_SPREAD = {"cluster": 3.0, "radix": 2.0}
GVR_SPEEDUP = 1.9
GVR_LENGTHS = (16384, 262144)
RADIX_BATCHES = (1, 8, 64)
RADIX_SPEEDUP_LONGEST = 3.0


class Index:
    """Times of the results by cell and implementation."""

    def __init__(self, results: Iterable[Results]) -> None:
        self.results = list(results)
        self._by_place = {(result["cell"]["key"], result["impl"]): result for result in self.results}

    def time(self, key: str, impl: str, which: str = "cold_us") -> float | None:
        """Microseconds, or None where it was not measured or was not exact."""
        result = self._by_place.get((key, impl))
        if result is None or result.get(which) is None or result["exact"] is False:
            return None
        return float(result[which])

    def wrong(self, impl: str) -> int:
        """Cells at which an implementation's answer was wrong."""
        return sum(result["impl"] == impl and result["exact"] is False for result in self.results)

    def entry(self, key: str, impl: str, which: str) -> str:
        """A table's entry: the time, with a star where the answer was wrong."""
        result = self._by_place.get((key, impl))
        if result is None or result.get(which) is None:
            return "-"
        return f"{result[which]:.2f}" + ("*" if result["exact"] is False else "")

    def cells(self, keep: Callable[[Mapping[str, Any]], bool] = lambda cell: True) -> list[Mapping[str, Any]]:
        """Cells of the results, in their order, each once."""
        found = {result["cell"]["key"]: result["cell"] for result in self.results}
        return [cell for cell in found.values() if keep(cell)]

    def ratios(
        self,
        other: str,
        ours: str,
        keep: Callable[[Mapping[str, Any]], bool] = lambda cell: True,
        which: str = "cold_us",
    ) -> dict[str, float]:
        """Time of `other` over the time of `ours` at every cell that has both: above 1, ours is faster."""
        ratios = {}
        for cell in self.cells(keep):
            mine, its = self.time(cell["key"], ours, which), self.time(cell["key"], other, which)
            if mine and its:
                ratios[cell["key"]] = its / mine
        return ratios


def geometric_mean(values: Iterable[float]) -> float:
    """Mean of ratios that treats 2 and 1/2 alike."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def worst_ratios(index: Index, ours: str = "cluster") -> list[Check]:
    """For each other implementation, the cell where `ours` compares worst, cold and warm.

    Cells of every group count. Where the other's answer is wrong its time is not compared; `wrong` says
    how often that was.
    """
    rows = []
    for other in ALL:
        if other in (ours, EARLY):
            continue
        for which in ("cold_us", "warm_us"):
            ratios = index.ratios(other, ours, which=which)
            if ratios:
                worst = min(ratios, key=lambda key: ratios[key])
                rows.append(
                    {
                        "other": other,
                        "which": which.removesuffix("_us"),
                        "ratio": ratios[worst],
                        "cell": worst,
                        "cells": len(ratios),
                        "wrong": index.wrong(other),
                        "geometric_mean": geometric_mean(ratios.values()),
                    }
                )
    return rows


def checks(index: Index) -> list[Check]:
    """Every wanted figure beside the one reached; `met` is None where nothing was measured."""
    found = [_time_target(index, n, batch, wanted) for (n, batch), wanted in TARGETS.items()]
    main = {(cell["n"], cell["batch"]): cell["key"] for cell in index.cells(_is("main"))}

    found.append(_hint_spread(index))
    for impl, wanted in ADVERSARIAL_SPREAD.items():
        normal = index.time(main.get((131072, 1), ""), impl)
        times = [index.time(cell["key"], impl) for cell in index.cells(_is("adversarial"))]
        slowest = max((time for time in times if time), default=None)
        reached = slowest / normal if slowest and normal else None
        found.append(
            _check(f"{impl}: adversarial rows over normal rows, N = 131,072", wanted, reached, "at most")
        )

    for impl in ("gvr_mean", "gvr_quantile"):
        layers = index.ratios("trtllm", impl, _is("layer"))
        mean = geometric_mean(layers.values()) if layers else None
        what = f"{impl}: speedup over trtllm, the paper's layers at N = 70,690, mean"
        found.append(_check(what, GVR_SPEEDUP, mean, "at least"))
        inside = index.ratios("trtllm", impl, _gvr_lengths)
        found.append(_least(f"{impl}: speedup over trtllm, N = 16,384 to 262,144, batch 1", 1.0, inside))
    every = index.ratios("trtllm", "radix", lambda cell: _is("main")(cell) and cell["batch"] in RADIX_BATCHES)
    found.append(_least("radix: speedup over trtllm, every N, batch 1, 8, 64", 1.0, every))
    longest = index.ratios("trtllm", "radix", lambda cell: _single(cell) and cell["n"] == 1048576)
    found.append(_least("radix: speedup over trtllm, N = 1,048,576, batch 1", RADIX_SPEEDUP_LONGEST, longest))
    return found


def _is(group: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda cell: bool(cell["group"] == group)


def _single(cell: Mapping[str, Any]) -> bool:
    return bool(cell["group"] == "main" and cell["batch"] == 1)


def _gvr_lengths(cell: Mapping[str, Any]) -> bool:
    low, high = GVR_LENGTHS
    return _single(cell) and low <= cell["n"] <= high


def _hint_cells(index: Index) -> list[list[str]]:
    """Cells that differ in their hint alone, shape by shape."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for cell in index.cells(_is("hint")):
        shapes.setdefault((cell["n"], cell["batch"]), []).append(cell["key"])
    for cell in index.cells(_is("main")):
        if (cell["n"], cell["batch"]) in shapes:
            shapes[cell["n"], cell["batch"]].append(cell["key"])
    return list(shapes.values())


def _check(what: str, wanted: float, reached: float | None, sense: str, where: str = "") -> Check:
    met = None
    if reached is not None:
        met = reached <= wanted if sense == "at most" else reached >= wanted
    return {"what": what, "sense": sense, "wanted": wanted, "reached": reached, "met": met, "where": where}


def _time_target(index: Index, n: int, batch: int, wanted: float) -> Check:
    keys = [cell["key"] for cell in index.cells(_is("main")) if (cell["n"], cell["batch"]) == (n, batch)]
    reached = index.time(keys[0], "cluster") if keys else None
    return _check(f"cluster: us at N = {n:,}, batch {batch}", wanted, reached, "at most")


def _hint_spread(index: Index) -> Check:
    worst, where = None, ""
    for keys in _hint_cells(index):
        times = {key: time for key in keys if (time := index.time(key, "cluster"))}
        if len(times) > 1:
            slowest = max(times, key=lambda key: times[key])
            ratio = times[slowest] / min(times.values())
            if worst is None or ratio > worst:
                worst, where = ratio, slowest
    what = "cluster: hints of every quality and none, slowest over fastest"
    return _check(what, HINT_SPREAD, worst, "at most", where)


def _least(what: str, wanted: float, ratios: Mapping[str, float]) -> Check:
    worst = min(ratios, key=lambda key: ratios[key]) if ratios else ""
    return _check(what, wanted, ratios.get(worst), "at least", worst)


def times_table(index: Index, group: str, which: str = "cold_us") -> Table:
    """Microseconds of every implementation at the cells of one group."""
    cells = index.cells(_is(group))
    impls = [
        impl for impl in (*ALL, FLOOR) if any(index.entry(cell["key"], impl, which) != "-" for cell in cells)
    ]
    table = Table(
        box=box.SIMPLE, title=f"{group}: us per launch, {which.removesuffix('_us')} L2; * = not exact"
    )
    table.add_column("cell")
    for impl in impls:
        table.add_column(impl, justify="right")
    for cell in cells:
        table.add_row(_short(cell), *(index.entry(cell["key"], impl, which) for impl in impls))
    return table


def _short(cell: Mapping[str, Any]) -> str:
    if cell["group"] == "main":
        return f"{cell['n']:,} x {cell['batch']}"
    return str(cell["key"])


def ratios_table(rows: list[Check], ours: str) -> Table:
    table = Table(box=box.SIMPLE, title=f"time of the other over time of {ours}: worst cell of all, and mean")
    for name in ("other", "L2", "worst", "at cell", "mean", "cells", "wrong"):
        table.add_column(name, justify="left" if name in ("other", "L2", "at cell") else "right")
    for row in rows:
        table.add_row(
            row["other"],
            row["which"],
            f"{row['ratio']:.2f}",
            row["cell"],
            f"{row['geometric_mean']:.2f}",
            str(row["cells"]),
            str(row["wrong"]),
        )
    return table


def checks_table(rows: list[Check]) -> Table:
    table = Table(box=box.SIMPLE, title="wanted and reached (cold L2)")
    for name in ("what", "wanted", "reached", "met", "where"):
        table.add_column(name, justify="right" if name in ("wanted", "reached") else "left")
    for row in rows:
        sign = "<=" if row["sense"] == "at most" else ">="
        reached = "not measured" if row["reached"] is None else f"{row['reached']:.2f}"
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        table.add_row(row["what"], f"{sign} {row['wanted']:g}", reached, met, row["where"])
    return table
