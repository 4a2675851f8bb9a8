"""Draw the kernel benchmark: microseconds over row length, one line per implementation.

python -m eval plot out/bench.json --out out/bench.png --all
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.bench.bench_report import BASELINES, FLOOR, FORMAT, OURS, Index
from eval.bench.peers import versions
from eval.common.options import read_results
from eval.report.provenance import digest_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "hinted": ("gvr_topk", "#d62728", "o"),
    "no_hint": ("gvr_topk, no hint", "#8c564b", "s"),
    "radix_rounds": ("gvr_topk, radix rounds alone", "#e377c2", "p"),
    "paper": ("gvr_topk, the paper's kernel", "#ff7f0e", "P"),
    "torch": ("torch.topk", "#7f7f7f", "v"),
    "trtllm": ("{TensorRT-LLM}", "#2ca02c", "^"),
    "vllm": ("{vLLM}", "#1f77b4", "D"),
    "vllm_per_row": ("{vLLM}, per row", "#76b7e0", "d"),
    "flashinfer": ("{FlashInfer} top_k", "#9467bd", "X"),
    "flashinfer_ragged": ("{FlashInfer}, ragged", "#c590d5", "x"),
    "flashinfer_deterministic": ("{FlashInfer}, deterministic", "#5e3c99", "*"),
    "cudnn": ("{cuDNN frontend} IndexerTopK, deterministic", "#17becf", "h"),
    FLOOR: ("reading the row alone", "#000000", ""),
}
"""Name in the legend, colour and marker of each line; projects stand in braces, and get the version that the
data say. Ways to call the op that lie on others are left out."""


KEY = "Source SHA-256"
"""Keyword of the text in a PNG that names the file that it was drawn from."""
SIGNATURE = b"\x89PNG\r\n\x1a\n"

FEW = ("hinted", "torch", "vllm", "flashinfer_deterministic", FLOOR)
"""Lines of the picture that is for a first look."""


def digest_in(image: Path) -> str | None:
    """Digest of the file that a PNG was drawn from; None where it has none, or is no PNG."""
    data = image.read_bytes() if image.is_file() else b""
    at = len(SIGNATURE)
    while data.startswith(SIGNATURE) and at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        keyword, _, text = data[at + 8 : at + 8 + length].partition(b"\0")
        if (kind, keyword) == (b"tEXt", KEY.encode()):
            return text.decode("latin-1")
        at += 12 + length
    return None


def draw(
    data: Mapping[str, Any],
    out: Path,
    batches: tuple[int, ...] = (1, 64),
    *,
    digest: str | None = None,
    everything: bool = False,
) -> None:
    """Draw the main sweep: Gaussian chains, one panel for each batch.

    Parameters
    ----------
    data : dict
        Content of the benchmark's JSON.
    out : Path
        Image to write; its suffix chooses the format.
    batches : tuple of int
        Rows per launch, one panel each.
    digest : str, optional
        That of the benchmark's file, which a PNG then names.
    everything : bool
        Draw every implementation, and what real traces take; otherwise the lines of `FEW` alone.

    Raises
    ------
    ValueError
        The data hold no main sweep of one of the batches.
    """
    from matplotlib.figure import Figure

    index = Index(data)
    names = versions(run["baselines"] for run in data["runs"])
    figure = Figure(figsize=(4.8 * len(batches), 6.4 if everything else 4.4), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for batch, axes in zip(batches, panels, strict=True):
        lines = _lines(index, batch, tuple(STYLES) if everything else FEW)
        if not lines:
            raise ValueError(f"batch: wanted one with results in group 'main', got {batch}")
        _panel(axes, lines, names)
        if everything:
            _traces(axes, index, batch)
        axes.set_title(f"{batch} row{'s' if batch > 1 else ''} per launch", fontsize="medium")
        axes.set_xlabel("scores in a row")
    panels[0].set_ylabel("time (µs)")
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=1 + len(batches), frameon=False
    )
    figure.suptitle(_title(data, batches), fontsize="medium")
    named = {KEY: digest} if digest is not None and out.suffix == ".png" else None
    figure.savefig(out, dpi=150, metadata=named)


def _title(data: Mapping[str, Any], batches: Sequence[int]) -> str:
    """What was measured where, of the runs alone whose results are drawn."""
    cells = {
        key: cell
        for key, cell in data["cells"].items()
        if cell["group"] in ("main", "trace") and cell["batch"] in batches
    }
    used = sorted({result.get("run", 0) for result in data["results"] if result["cell"] in cells})
    machines = [data["runs"][run]["machine"] for run in used]
    device, torch, commits = (
        ", ".join(dict.fromkeys(machine[name] for machine in machines))
        for name in ("device", "torch", "commit")
    )
    dtypes, ks = (", ".join(sorted({str(cell[name]) for cell in cells.values()})) for name in ("dtype", "k"))
    return f"top-k of {dtypes} rows, k = {ks}: {device}, torch {torch}, commit {commits}"


def _lines(index: Index, batch: int, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    cells = index.cells(lambda cell: cell["group"] == "main" and cell["batch"] == batch)
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["n"]):
        for name in names:
            time = index.figure(cell["key"], name)
            if time is not None:
                lines.setdefault(name, []).append((cell["n"], time))
    return lines


def _traces(axes: Axes, index: Index, batch: int) -> None:
    """Mark what real traces take: the slowest of ours, and the fastest of others."""
    cells = index.cells(lambda cell: cell["group"] == "trace" and cell["batch"] == batch)
    for label, color, choose, impls in (
        ("gvr_topk, slowest of the real traces", "#d62728", max, ("hinted",)),
        ("fastest other, real traces", "#1f77b4", min, BASELINES),
    ):
        figures = (index.figure(cell["key"], impl) for cell in cells for impl in impls)
        times = [figure for figure in figures if figure is not None]
        if times:
            style: dict[str, Any] = {"marker": "*", "markersize": 11, "linestyle": ""}
            style |= {"color": color, "label": label, "markeredgecolor": "black"}
            axes.plot(max(cell["n"] for cell in cells), choose(times), **style)


def _panel(axes: Axes, lines: dict[str, list[tuple[int, float]]], names: Mapping[str, str]) -> None:
    for name, points in lines.items():
        label, color, marker = STYLES[name]
        label = label.format(**names)
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
    out: Annotated[Path, typer.Option(help="Image to write.")] = Path("out/bench.png"),
    batches: Annotated[str, typer.Option(help="Rows per launch, comma-separated.")] = "1,64",
    everything: Annotated[bool, typer.Option("--all", help="Draw every implementation.")] = False,
) -> None:
    """Draw a result file."""
    data = read_results(results, FORMAT)
    rows = [batch.strip() for batch in batches.split(",")]
    if not all(batch.isdigit() for batch in rows):
        raise typer.BadParameter(f"--batches: wanted numbers, comma-separated, got {batches!r}")
    try:
        draw(data, out, tuple(map(int, rows)), digest=digest_of(results), everything=everything)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    print(out)
