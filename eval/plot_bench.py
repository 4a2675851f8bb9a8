"""Draw the kernel benchmark: microseconds over row length, one line per implementation.

python -m eval plot eval/results/h200/bench.json --out bench.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from eval.common.bench_report import BASELINES, FLOOR, FORMAT, OURS, Index

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "hinted": ("gvr_topk", "#d62728", "o"),
    "no_hint": ("gvr_topk, no hint", "#8c564b", "s"),
    "radix_rounds": ("gvr_topk, radix rounds alone", "#e377c2", "p"),
    "paper": ("gvr_topk, the paper's kernel", "#ff7f0e", "P"),
    "torch": ("torch.topk", "#7f7f7f", "v"),
    "trtllm": ("TensorRT-LLM 1.2.1", "#2ca02c", "^"),
    "vllm": ("vLLM 0.33", "#1f77b4", "D"),
    "vllm_per_row": ("vLLM 0.33, per row", "#76b7e0", "d"),
    "flashinfer": ("FlashInfer 0.7.2 top_k", "#9467bd", "X"),
    "flashinfer_ragged": ("FlashInfer 0.7.2, ragged", "#c590d5", "x"),
    FLOOR: ("reading the row alone", "#000000", ""),
}
"""Name in the legend, colour and marker of each line. Ways to call the op that lie on others are left out."""


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
            raise ValueError(f"batch: wanted one with results in group 'main', got {batch}")
        _panel(axes, lines)
        _traces(axes, index, batch)
        axes.set_title(f"batch {batch}, cold L2")
        axes.set_xlabel("row length N")
    panels[0].set_ylabel("us per launch")
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    machine = data["runs"][-1]["machine"]
    figure.suptitle(
        f"top-k of fp32 rows, k = 2048: {machine['device']}, torch {machine['torch']}, {machine['commit']}",
        fontsize="medium",
    )
    figure.savefig(out, dpi=150)


def _lines(index: Index, batch: int) -> dict[str, list[tuple[int, float]]]:
    cells = index.cells(lambda cell: cell["group"] == "main" and cell["batch"] == batch)
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["n"]):
        for name in STYLES:
            time = index.figure(cell["key"], name)
            if time is not None:
                lines.setdefault(name, []).append((cell["n"], time))
    return lines


def _traces(axes: Axes, index: Index, batch: int) -> None:
    """Mark what real traces take: the slowest of ours, and the fastest of others."""
    cells = index.cells(lambda cell: cell["group"] == "trace" and cell["batch"] == batch)
    ours, others = (
        [index.figure(cell["key"], impl) for cell in cells for impl in impls]
        for impls in (("hinted",), BASELINES)
    )
    marks = (
        ("gvr_topk, slowest of the real traces", "#d62728", max, ours),
        ("fastest other, real traces", "#1f77b4", min, others),
    )
    for label, color, choose, figures in marks:
        times = [figure for figure in figures if figure is not None]
        if times:
            style: dict[str, Any] = {
                "marker": "*",
                "markersize": 11,
                "linestyle": "",
                "markeredgecolor": "black",
            }
            axes.plot(max(cell["n"] for cell in cells), choose(times), color=color, label=label, **style)


def _panel(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in lines.items():
        label, color, marker = STYLES[name]
        # Thin and hollow on top of thick: lines that run together stay visible below one another.
        style: dict[str, Any] = {"marker": marker, "markersize": 5, "linewidth": 1.2, "zorder": 3}
        if name in OURS:
            style |= {"markersize": 4, "linewidth": 2.4, "zorder": 2}
        else:
            style |= {"markerfacecolor": "none"}
        if name == "trtllm":  # vLLM's per-row kernel takes the same time nearly everywhere
            style |= {"linewidth": 4.5, "alpha": 0.45, "zorder": 1}
        if name == FLOOR:
            style = {"linestyle": ":", "linewidth": 1.6}
        axes.plot(*zip(*points, strict=True), color=color, label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1 << power for power in range(12, 21, 2)], ["4K", "16K", "64K", "256K", "1M"])
    ticks = [2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main(
    results: Annotated[Path, typer.Argument(help="JSON of the verb bench.")],
    out: Annotated[Path, typer.Option(help="Image to write.")] = Path("bench_kernels.png"),
    batches: Annotated[str, typer.Option(help="Rows per launch, comma-separated.")] = "1,64",
) -> None:
    """Draw a result file."""
    try:
        data = json.loads(results.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{results}: wanted a result file, got {error}") from None
    got = data.get("format") if isinstance(data, dict) else None
    if got != FORMAT:
        raise typer.BadParameter(f"{results}: wanted format {FORMAT!r}, got {got!r}")
    rows = [batch.strip() for batch in batches.split(",")]
    if not all(batch.isdigit() for batch in rows):
        raise typer.BadParameter(f"--batches: wanted numbers, comma-separated, got {batches!r}")
    try:
        draw(data, out, tuple(map(int, rows)))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    print(out)


if __name__ == "__main__":
    typer.run(main)
