"""Compare the benchmarks of two commits that took turns on one GPU.

    python -m eval compare before_1.json after_1.json after_2.json before_2.json

The files are those of ``python -m eval bench``; the first one's commit is the one before. A cell is one kind
of row and one of this package's ways to call an op, and its time the median over a commit's files. Several
files of one commit say how far runs of the same code lie apart; a ratio below that means nothing. Cells of
decode whose rows are others in one of the files are left out. Files of different GPUs are refused, and files
in which a result of this package is wrong.
"""

import statistics
from pathlib import Path
from typing import Annotated

import typer

from eval.bench.bench_report import FORMAT, OURS
from eval.common.options import read_results
from eval.common.tables import markdown_table

Times = dict[tuple[str, str, float | None], float]
"""Microseconds by cell, implementation, and, but for prefill, the share of a step's choice that was the step
before's, which other rows of the same name hardly have in common."""

TOLERANCE = 1.01
"""Ratio above which a cell is slower."""
SHOWN = 10


def read_times(file: Path) -> tuple[str, str, Times]:
    """The commit, the device and the times of a result file.

    It must be of one commit on one device, and hold no result of this package that is wrong.
    """
    data = read_results(file, FORMAT)
    machines = {(run["machine"]["commit"], run["machine"]["device"]) for run in data["runs"]}
    if len(machines) != 1:
        raise typer.BadParameter(f"{file}: wanted one commit on one device, got {sorted(machines)}")
    ours = [result for result in data["results"] if result["impl"] in OURS]
    if wrong := [f"{each['impl']} at {each['cell']}" for each in ours if each["exact"] is False]:
        raise typer.BadParameter(f"{file}: wanted exact results, got wrong ones: {', '.join(wrong)}")
    times = {
        (each["cell"], each["impl"], data["cells"][each["cell"]].get("hit_ratio")): each["cold_us"]
        for each in ours
        if each["cold_us"] is not None
    }
    return *machines.pop(), times


def compare(before: list[Times], after: list[Times]) -> str:
    """Mean ratio of the cells that all files have, the slowest cells, and how far a commit's files differ."""
    cells = [cell for cell in before[0] if all(cell in times for times in before + after)]
    if not cells:
        raise typer.BadParameter("wanted cells that all files have, got none")
    old, new = ({cell: [times[cell] for times in of] for cell in cells} for of in (before, after))
    ratios = {cell: statistics.median(new[cell]) / statistics.median(old[cell]) for cell in cells}
    slower = [cell for cell in sorted(cells, key=lambda cell: -ratios[cell]) if ratios[cell] > TOLERANCE]
    mean = statistics.geometric_mean(ratios.values())
    always = sum(min(new[cell]) > max(old[cell]) for cell in slower)
    lines = [
        f"after over before, geometric mean of {len(cells)} cells: {mean:.4f}",
        f"slower by more than {TOLERANCE - 1:.0%}: {len(slower)}, of which {always} in every file",
        f"left out, because a file lacks their rows: {len(before[0]) - len(cells)}",
    ]
    for name, times in (("before", old), ("after", new)):
        spreads = [max(us) / min(us) - 1 for us in times.values()]
        apart = f"{statistics.median(spreads):.2%} apart in the median, {max(spreads):.2%} at most"
        lines.append(f"files {name}: {len(times[cells[0]])}, {apart}")
    rows = [
        (" ".join(cell[:2]), _joined(old[cell]), _joined(new[cell]), f"{ratios[cell]:.3f}")
        for cell in slower[:SHOWN]
    ]
    table = [markdown_table(("slowest", "us before", "us after", "ratio"), rows)] if rows else []
    return "\n".join(lines + table)


def _joined(times: list[float]) -> str:
    return " ".join(f"{us:.2f}" for us in times)


def main(files: Annotated[list[Path], typer.Argument(help="Results of bench, of two commits.")]) -> None:
    """Print what became slower."""
    by_commit: dict[str, list[Times]] = {}
    devices = set()
    for file in files:
        commit, device, times = read_times(file)
        devices.add(device)
        by_commit.setdefault(commit, []).append(times)
    if len(devices) != 1:
        raise typer.BadParameter(f"wanted files of one device, got {', '.join(sorted(devices))}")
    if len(by_commit) != 2:
        raise typer.BadParameter(f"wanted files of two commits, got {', '.join(by_commit)}")
    print(f"{' to '.join(by_commit)}, {devices.pop()}")
    print(compare(*by_commit.values()))
