"""What the kernel benchmark's JSON says: its layout, its figures by cell, ratios, and who was measured."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eval.bench.oracles import BLOCKS_GROUP
from eval.bench.our_kernels import (
    BLOCKS,
    HINTED,
    IMPLEMENTATIONS,
    IN_BLOCKS,
    LAST_SLICE,
    NO_HINT,
    PAPER,
    PDL,
    PREFILL,
    PREFILL_ROUNDS,
    PREFILL_SLICES,
    RADIX_ROUNDS,
)

FORMAT = "gvr_topk.bench_kernels/3"

Cell = Mapping[str, Any]
Results = Mapping[str, Any]

OURS = tuple(IMPLEMENTATIONS)
BASELINES = (
    *("torch", "trtllm", "vllm", "flashinfer", "flashinfer_ragged", "flashinfer_deterministic", "cudnn"),
    *("trtllm_prefill", "vllm_prefill", "torch_blocks", "torch_in_blocks"),
)
ALL = (*OURS, *BASELINES)
REFERENCES = (HINTED, PREFILL, BLOCKS)
"""This package's default in each kind of cell, whose run the other figures of the cell must be of."""
FLOOR = "read_floor"
"""Reading the rows and nothing else."""

GROUPS = (
    *("main", "trace", "engine", "scale", "mask", "layer", "prefill", "hint", "v4", "adversarial"),
    *("wide_buffers", "unaligned", "k", "dtype", BLOCKS_GROUP),
)
"""Parts of the benchmark."""
_SHORT = ("main", "trace", "engine", "scale", "layer")
_ANY = tuple(group for group in GROUPS if group not in ("prefill", "hint", BLOCKS_GROUP))
MEASURED: dict[str, tuple[str, ...]] = {
    HINTED: (*_ANY, "hint"),
    NO_HINT: (*_ANY, "hint", "prefill"),
    RADIX_ROUNDS: ("main", "trace"),
    PDL: ("main",),
    PAPER: ("main", "trace", "layer"),
    **dict.fromkeys((PREFILL, PREFILL_ROUNDS, PREFILL_SLICES, LAST_SLICE), ("prefill",)),
    **dict.fromkeys(("trtllm_prefill", "vllm_prefill"), ("prefill",)),
    **dict.fromkeys((BLOCKS, IN_BLOCKS, "torch_blocks", "torch_in_blocks"), (BLOCKS_GROUP,)),
    "torch": (*_SHORT, "adversarial", "prefill", "v4"),
    "trtllm": (*_SHORT, "mask", "adversarial", "v4"),
    "vllm": _ANY,
    "flashinfer": _SHORT,
    "flashinfer_ragged": (*_SHORT, "prefill", "v4"),
    "flashinfer_deterministic": (*_ANY, "prefill"),
    "cudnn": (*_SHORT, "mask", "adversarial", "v4"),
}
"""Groups in which each implementation is measured, so that all of them fit into one run.

vLLM and FlashInfer's deterministic call, which are nearest to this package, are measured wherever they can
be. Others take no hint. Chunks of a prefill are for ops that are made for it, and for decode ops that take a
length for each row, but not for other projects' decode kernels, which are not made for so many rows."""

SHAPES = ((8192, 1), (32768, 1), (70690, 1), (131072, 1), (1048576, 1), (8192, 64), (131072, 64))
"""Length and batch of the rows that the pages show, which are measured first."""
PREFILL_SHAPES = ((8192, 8192), (32768, 2048), (32768, 8192), (131072, 2048), (131072, 8192))
"""Columns and rows of the chunks of a prefill."""


class Index:
    """Results by cell and implementation.

    A file may hold several runs. Two machines of one kind differ by more than most changes, so a figure of
    another run than this package's own at the same cell is left out: no ratio crosses runs.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        own = {
            result["cell"]: result.get("run", 0)
            for result in data["results"]
            if result["impl"] in REFERENCES and result["cold_us"] is not None
        }
        self.results: list[Results] = [
            result
            for result in data["results"]
            if result.get("run", 0) == own.get(result["cell"], result.get("run", 0))
        ]
        self._cells: dict[str, Cell] = {key: {"key": key, **cell} for key, cell in data["cells"].items()}
        self._results = {(result["cell"], result["impl"]): result for result in self.results}

    def figure(self, key: str, impl: str, name: str = "cold_us") -> float | None:
        """A figure of a result, or None where it was not measured or the result was not exact."""
        result = self._results.get((key, impl))
        if result is None or result.get(name) is None or result["exact"] is False:
            return None
        return float(result[name])

    def wrong(self, impl: str) -> int:
        """Cells at which an implementation gave an answer that was wrong."""
        answers = (its for its in self.results if its["impl"] == impl and its["cold_us"] is not None)
        return sum(its["exact"] is False for its in answers)

    def cells(self, keep: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
        """Cells with results, in their order."""
        return [cell for cell in self._cells.values() if keep(cell)]

    def group(self, *names: str) -> list[Cell]:
        """Cells of some groups."""
        return self.cells(lambda cell: cell["group"] in names)

    def main(self, n: int, batch: int) -> str:
        """Key of a shape's cell in the main sweep; empty if there is none."""
        return next((c["key"] for c in self.group("main") if (c["n"], c["batch"]) == (n, batch)), "")

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


def worst_ratios(index: Index) -> dict[str, dict[str, Any]]:
    """By other implementation, its time over the time of `HINTED`: at the worst of the cells, and the mean.

    Cells of every group count. Where the other's answer is wrong its time is not compared; `wrong` says
    how often that was.
    """
    found = {}
    for other in (NO_HINT, RADIX_ROUNDS, PAPER, *BASELINES):
        if ratios := index.ratios(other, HINTED):
            found[other] = {
                "ratio": min(ratios.values()),
                "cells": len(ratios),
                "wrong": index.wrong(other),
                "geometric_mean": statistics.geometric_mean(ratios.values()),
            }
    return found


def slowdowns(index: Index, group: str) -> dict[str, float]:
    """Time at each cell of a group over the time of the main sweep's cell of the same shape."""
    found = {}
    for cell in index.group(group):
        hard = index.figure(cell["key"], HINTED)
        usual = index.figure(index.main(cell["n"], cell["batch"]), HINTED)
        if hard and usual:
            found[cell["key"]] = hard / usual
    return found


def worst_launch(index: Index, key: str) -> float | None:
    """Worst launch with a hint over the mean launch without one."""
    worst, without = index.figure(key, HINTED, "worst_us"), index.figure(key, NO_HINT)
    return worst / without if worst and without else None


def sampling_table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Make the head and the lines of a table, a setting and its peers behind each other."""
    cells = {(each["setting"], each["dtype"], each["rows"]): each for each in results}
    settings, dtypes, rows = (list(dict.fromkeys(each)) for each in zip(*cells, strict=True))
    lines = []
    for setting in settings:
        row = [cells[setting, dtype, count] for dtype in dtypes for count in rows]
        lines.append([setting, *(f"{each['us']:.1f}" for each in row)])
        for peer in row[0]["peers"]:
            lines.append([f"{setting}: {peer}", *(f"{each['peers'][peer]['us']:.1f}" for each in row)])
    return ["", *(f"{dtype} x {count:,}" for dtype in dtypes for count in rows)], lines


def topk_table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The same of `topk`, unsorted and sorted, and of PyTorch's, by k."""
    columns = sorted({each["k"] for each in results})
    times = {(each["dtype"], each["width"], each["rows"], each["k"]): each for each in results}
    lines = []
    for dtype, width, rows in dict.fromkeys(key[:3] for key in times):
        cells = [times[dtype, width, rows, k] for k in columns]
        calls = ("unsorted", "topk", "torch")
        us = (" / ".join(f"{each[f'{call}_us']:.0f}" for call in calls) for each in cells)
        lines.append([f"{dtype}, {width:,} x {rows}", *us])
    return ["N x rows", *(f"{k:,}" for k in columns)], lines


PROJECTS = ("TensorRT-LLM", "vLLM", "FlashInfer", "cuDNN frontend")
_VERSION = re.compile(rf"({'|'.join(PROJECTS)}) (\d+(?:\.\w+)*)")


def versions(described: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Name of each project, with its version where a run measured it, from ``baselines`` of every run."""
    found: dict[str, set[str]] = {project: set() for project in PROJECTS}
    for baselines in described:
        for baseline in baselines.values():
            match = _VERSION.match(baseline["version"])
            if match and not baseline["why_not"]:
                found[match[1]].add(match[2])
    return {project: " ".join([project, *sorted(its)]) for project, its in found.items()}


def peer_names(described: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What a table calls each implementation of another project."""
    named = versions(described)
    return {
        "torch": "torch.topk",
        "trtllm": named["TensorRT-LLM"],
        "vllm": named["vLLM"],
        "flashinfer": f"{named['FlashInfer']} `top_k`",
        "flashinfer_ragged": "FlashInfer, ragged",
        "flashinfer_deterministic": f"{named['FlashInfer']}, deterministic",
        "cudnn": f"{named['cuDNN frontend']} `IndexerTopK`",
    }
