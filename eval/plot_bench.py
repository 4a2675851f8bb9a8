"""Draw the kernel benchmark: microseconds over row length, one line per implementation.

python eval/plot_bench.py eval/results/h200/bench.json --out bench.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from eval.common.bench_report import ALL, FLOOR, OURS, Index

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "hinted": "#d62728",
    "no_hint": "#8c564b",
    "no_row_slot": "#ff9896",
    "prior_only": "#c49c94",
    "pdl": "#e377c2",
    "paper": "#ff7f0e",
    "torch": "#7f7f7f",
    "trtllm": "#2ca02c",
    "vllm": "#1f77b4",
    "vllm_per_row": "#aec7e8",
    "flashinfer": "#9467bd",
    "flashinfer_ragged": "#c5b0d5",
    FLOOR: "#000000",
}


def draw(data: dict[str, Any], out: Path, batches: tuple[int, ...] = (1, 64)) -> None:
    """Draw the main sweep: Gaussian chains, one panel for each batch.

    Parameters
    ----------
    data : dict
        Content of the benchmark's JSON.
    out : Path
        Image to write; its suffix chooses the format.
    batches : tuple of int
        Rows per launch, one panel each.

    Raises
    ------
    ValueError
        The data hold no main sweep of one of the batches.
    """
    from matplotlib.figure import Figure

    index = Index(data)
    figure = Figure(figsize=(1.5 + 4.8 * len(batches), 4.6), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for batch, axes in zip(batches, panels, strict=True):
        lines = _lines(index, batch)
        if not lines:
            raise ValueError(f"batch: want one with results in group 'main', got {batch}")
        _panel(axes, lines)
        axes.set_title(f"batch {batch}, cold L2")
        axes.set_xlabel("row length N")
    panels[0].set_ylabel("us per launch")
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    machine = data["runs"][-1]["machine"]
    figure.suptitle(
        f"top-k of fp32 rows, k = 2048: {machine['device']}, torch {machine['torch']}, {machine['commit']}"
    )
    figure.savefig(out, dpi=150)


def _lines(index: Index, batch: int) -> dict[str, list[tuple[int, float]]]:
    cells = index.cells(lambda cell: cell["group"] == "main" and cell["batch"] == batch)
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["n"]):
        for name in (*ALL, FLOOR):
            time = index.figure(cell["key"], name)
            if time is not None:
                lines.setdefault(name, []).append((cell["n"], time))
    return lines


def _panel(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in lines.items():
        style: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 2.2 if name in OURS else 1.3}
        if name == FLOOR:
            style = {"linestyle": ":", "linewidth": 1.6}
        label = "read only (floor)" if name == FLOOR else name
        axes.plot(*zip(*points, strict=True), color=COLORS[name], label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1 << power for power in range(12, 21, 2)], ["4K", "16K", "64K", "256K", "1M"])
    ticks = [2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main(
    results: Annotated[Path, typer.Argument(help="JSON of eval/bench_kernels.py.")],
    out: Annotated[Path, typer.Option(help="Image to write.")] = Path("bench_kernels.png"),
    batches: Annotated[str, typer.Option(help="Rows per launch, comma-separated.")] = "1,64",
) -> None:
    """Draw a result file."""
    draw(json.loads(results.read_text()), out, tuple(int(batch) for batch in batches.split(",")))
    print(out)


if __name__ == "__main__":
    typer.run(main)
