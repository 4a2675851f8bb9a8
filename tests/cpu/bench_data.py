"""Result files of the kernel benchmark with made-up figures, and short chains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from eval.bench import kernel_timing
from eval.bench.bench_cases import Cell
from eval.bench.bench_report import FORMAT, Index
from eval.bench.our_kernels import VARIANTS


@pytest.fixture(autouse=True)
def short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chains on the CPU be as short as a chain can be, whatever a row's size."""
    monkeypatch.setattr(kernel_timing, "MIN_STEPS", 6)
    monkeypatch.setattr(kernel_timing, "MAX_STEPS", 6)


CAUSAL = Cell("prefill", 300, 200, k=64, rows="causal")


def result(
    cell: Cell, impl: str, cold: float | None, exact: bool | None = True, **more: Any
) -> dict[str, Any]:
    return {"cell": cell.key, "impl": impl, "cold_us": cold, "exact": exact, **more}


def file_of(*results: tuple[Cell, dict[str, Any]]) -> dict[str, Any]:
    """Content of a result file with these results at these cells."""
    machine = {"device": "a GPU", "torch": "2", "commit": "abc", "date": "2026-11-22"}
    return {
        "format": FORMAT,
        "method": "",
        "runs": [
            {
                "machine": machine,
                **{name: list(VARIANTS[name].arguments) for name in ("hinted", "no_hint")},
                "baselines": {},
                "sets_in_20_runs": {"hinted": 1},
            }
        ],
        "cells": {cell.key: asdict(cell) for cell, _ in results},
        "results": [its for _, its in results],
    }


def index_of(*results: tuple[Cell, dict[str, Any]]) -> Index:
    return Index(file_of(*results))
