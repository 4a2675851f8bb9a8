"""``python -m eval compare``: slower cells are named, and files that cannot be compared are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.bench.bench_report import FORMAT

OTHER = {"machine": {"commit": "abc", "device": "GPU 1"}}
TIMES = {("a", "hinted"): 10.0, ("a", "no_hint"): 20.0, ("b", "hinted"): 5.0}


def write(
    path: Path,
    commit: str,
    device: str = "GPU 1",
    scale: float = 1.0,
    hit_ratio: float = 0.5,
    **slower: float | None,
) -> str:
    """Write a result file with `TIMES`, those of the cells in `slower` times a factor, or None.

    `hit_ratio` is that of cell b.
    """

    def us(cell: str, time: float) -> float | None:
        factor = slower.get(cell, 1.0)
        return None if factor is None else time * scale * factor

    results: list[dict[str, Any]] = [
        {"cell": cell, "impl": impl, "cold_us": us(cell, time), "exact": True}
        for (cell, impl), time in TIMES.items()
    ]
    results.append({"cell": "a", "impl": "vllm", "cold_us": 1.0, "exact": False})
    runs = [{"machine": {"commit": commit, "device": device}}]
    cells = {"a": {"hit_ratio": 0.5}, "b": {"hit_ratio": hit_ratio}}
    path.write_text(json.dumps({"format": FORMAT, "runs": runs, "cells": cells, "results": results}))
    return str(path)


def test_a_cell_that_is_2_percent_slower_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [write(tmp_path / "b1", "abc"), write(tmp_path / "b2", "abc", scale=1.002)]
    after = [write(tmp_path / "a1", "def", b=1.02), write(tmp_path / "a2", "def", b=1.025)]
    assert main(["compare", before[0], *after, before[1]]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:6] == [
        "abc to def, GPU 1",
        "after over before, geometric mean of 3 cells: 1.0064",
        "slower by more than 1%: 1, of which 1 in every file",
        "left out, because a file lacks their rows: 0",
        "files before: 2, 0.20% apart in the median, 0.20% at most",
        "files after: 2, 0.00% apart in the median, 0.49% at most",
    ]
    assert [line.split("|")[1:-1] for line in said[8:]] == [
        [" b hinted ", " 5.00 5.01 ", " 5.10 5.12 ", " 1.021 "]
    ]


def test_cells_that_a_file_lacks_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "b1", "abc")
    assert main(["compare", before, write(tmp_path / "a1", "def", a=None)]) == 0
    assert "mean of 1 cells: 1.0000" in capsys.readouterr().out
    assert main(["compare", before, write(tmp_path / "a1", "def", a=None, b=None)]) == 2


def test_cells_of_other_rows_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path / "b1", "abc")
    assert main(["compare", before, write(tmp_path / "a1", "def", hit_ratio=0.4999, b=2.0)]) == 0
    said = capsys.readouterr().out
    assert "mean of 2 cells: 1.0000" in said and "a file lacks their rows: 1" in said


@pytest.mark.parametrize(
    ("commit", "device", "change", "text"),
    [
        ("def", "GPU 2", lambda data: None, "wanted files of one device, got GPU 1, GPU 2"),
        ("abc", "GPU 1", lambda data: None, "wanted files of two commits, got abc"),
        ("def", "GPU 1", lambda data: data["results"][0].update(exact=False), "got wrong ones: hinted at a"),
        ("def", "GPU 1", lambda data: data["runs"].append(OTHER), "wanted one commit on one device"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    commit: str,
    device: str,
    change: Callable[[dict[str, Any]], None],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, after = write(tmp_path / "b", "abc"), Path(write(tmp_path / "a", commit, device))
    data = json.loads(after.read_text())
    change(data)
    after.write_text(json.dumps(data))
    assert main(["compare", before, str(after)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and text in " ".join(said.err.replace("│", " ").split())
