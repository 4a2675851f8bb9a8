"""The picture of the kernel benchmark: microseconds over row length, one line for each implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.bench.bench_report import FLOOR, OURS, Index
from eval.bench.peers import versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "hinted": ("gvr_topk", "#d62728", "o"),
    "torch": ("torch.topk", "#7f7f7f", "v"),
    "vllm": ("{vLLM}", "#1f77b4", "D"),
    "flashinfer_deterministic": ("{FlashInfer}, deterministic", "#5e3c99", "*"),
    FLOOR: ("reading the row alone", "#000000", ""),
}
"""Name in the legend, colour and marker of each line; projects stand in braces, and get the version that the
data say."""

KEY = "Source SHA-256"
"""Keyword of the text in the PNG that names the file that it was drawn from."""


def digest_in(image: Path) -> str | None:
    """Digest of the file that a PNG was drawn from; None where it has none, or there is no PNG."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(image) as opened:
            return opened.info.get(KEY)
    except (FileNotFoundError, UnidentifiedImageError):
        return None


def draw(data: Mapping[str, Any], out: Path, batches: tuple[int, ...] = (1, 64), *, digest: str = "") -> None:
    """Draw the main sweep: Gaussian chains, one panel for each batch.

    The suffix of `out` chooses the format. A PNG names the digest of the benchmark's file, if it is given.
    """
    from matplotlib.figure import Figure

    index = Index(data)
    names = versions(run["baselines"] for run in data["runs"])
    figure = Figure(figsize=(4.8 * len(batches), 4.4), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for batch, axes in zip(batches, panels, strict=True):
        _panel(axes, _lines(index, batch), names)
        axes.set_title(f"{batch} row{'s' if batch > 1 else ''} per launch", fontsize="medium")
        axes.set_xlabel("scores in a row")
    panels[0].set_ylabel("time (µs)")
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=1 + len(batches), frameon=False
    )
    figure.suptitle(_title(data, batches), fontsize="medium")
    figure.savefig(out, dpi=150, metadata={KEY: digest} if digest and out.suffix == ".png" else None)


def _title(data: Mapping[str, Any], batches: Sequence[int]) -> str:
    """What was measured where, of the runs alone whose results are drawn."""
    cells = {
        key: cell
        for key, cell in data["cells"].items()
        if cell["group"] == "main" and cell["batch"] in batches
    }
    used = sorted({result.get("run", 0) for result in data["results"] if result["cell"] in cells})
    machines = [data["runs"][run]["machine"] for run in used]
    device, torch, commits = (
        ", ".join(dict.fromkeys(machine[name] for machine in machines))
        for name in ("device", "torch", "commit")
    )
    dtypes, ks = (", ".join(sorted({str(cell[name]) for cell in cells.values()})) for name in ("dtype", "k"))
    return f"top-k of {dtypes} rows, k = {ks}: {device}, torch {torch}, commit {commits}"


def _lines(index: Index, batch: int) -> dict[str, list[tuple[int, float]]]:
    cells = index.cells(lambda cell: cell["group"] == "main" and cell["batch"] == batch)
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["n"]):
        for name in STYLES:
            time = index.figure(cell["key"], name)
            if time is not None:
                lines.setdefault(name, []).append((cell["n"], time))
    return lines


def _panel(axes: Axes, lines: dict[str, list[tuple[int, float]]], names: Mapping[str, str]) -> None:
    for name, points in lines.items():
        label, color, marker = STYLES[name]
        style: dict[str, Any] = {"marker": marker, "markersize": 5, "linewidth": 1.2, "zorder": 3}
        if name in OURS:
            style |= {"markersize": 4, "linewidth": 2.4, "zorder": 2}
        if name == FLOOR:
            style = {"linestyle": ":", "linewidth": 1.6}
        axes.plot(*zip(*points, strict=True), color=color, label=label.format(**names), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1 << power for power in range(12, 21, 2)], ["4K", "16K", "64K", "256K", "1M"])
    ticks = [2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
