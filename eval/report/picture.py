"""The pictures of the pages: a line for each implementation over the length of a row."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.bench.bench_report import FLOOR, OURS, Index, versions
from eval.report.vllm_report import MODES

STYLES = {
    "hinted": ("gvr_topk", "#d62728", "o"),
    "torch": ("torch.topk", "#7f7f7f", "v"),
    "vllm": ("{vLLM}", "#1f77b4", "D"),
    "flashinfer_deterministic": ("{FlashInfer}, deterministic", "#5e3c99", "*"),
    FLOOR: ("reading the row alone", "#000000", ""),
}
"""Name in the legend, colour and marker of each line; projects stand in braces, and get the version that the
data say."""

SLICES_STYLES = {"stock": STYLES["vllm"][1:], "ours": STYLES["hinted"][1:]}
"""Colour and marker of vLLM's prompts and of ours in slices."""

BATCHES = (1, 64)
"""Rows of a launch in the panels of the benchmark."""

KEY = "Source SHA-256"
"""Keyword of the text in the PNG that names what it was drawn from."""

Line = tuple[str, Sequence[tuple[int, float]], dict[str, Any]]
"""Label, points and style."""


def digest_in(image: Path) -> str | None:
    """Digest of what a PNG was drawn from; None where it has none, or there is no PNG."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(image) as opened:
            return opened.info.get(KEY)
    except (FileNotFoundError, UnidentifiedImageError):
        return None


def draw(data: Mapping[str, Any], out: Path, digest: str) -> None:
    """Draw the main sweep, Gaussian chains, in a panel for each batch; the PNG names its file's digest."""
    index = Index(data)
    names = versions(run["baselines"] for run in data["runs"])
    panels = [_lines(index, batch, names) for batch in BATCHES]
    columns = [f"{batch} row{'s' if batch > 1 else ''} per launch" for batch in BATCHES]
    _draw({"time (µs)": panels}, columns, "scores in a row", _title(data, index), out, digest)


def draw_slices(figures: Mapping[str, Any], out: Path, digest: str) -> None:
    """Draw what scores and top-k of prompts take, and what memory a step takes, a column for each heads."""
    heads = sorted({key[0] for key in figures["times"]})
    rows = {
        f"{figures['rows']:,} rows of a layer (ms)": [
            _slices_lines(figures["times"], each) for each in heads
        ],
        "memory of a step (MiB)": [_slices_lines(figures["peaks"], each) for each in heads],
    }
    title = f"scores and top-k of a prompt: {figures['source']}"
    _draw(rows, [f"{each} heads" for each in heads], "keys", title, out, digest)


def _slices_lines(figures: Mapping[tuple[int, ...], Mapping[str, float]], heads: int) -> list[Line]:
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for (of, budget, keys), by_mode in sorted(figures.items()):
        for mode, figure in by_mode.items() if of == heads else ():
            lines.setdefault((mode, budget), []).append((keys, figure))
    largest = max(budget for _, budget in lines)
    styled: list[Line] = []
    for (mode, budget), points in sorted(lines.items(), reverse=True):
        color, marker = SLICES_STYLES[mode]
        line, filled = ("-", "full") if budget == largest else ("--", "none")
        style = {"color": color, "marker": marker, "linestyle": line, "fillstyle": filled}
        styled.append((f"{MODES[mode]}, {budget} MiB", points, style))
    return styled


def _draw(
    rows: Mapping[str, Sequence[Sequence[Line]]],
    columns: Sequence[str],
    xlabel: str,
    title: str,
    out: Path,
    digest: str,
) -> None:
    """Draw panels, of which each row has a y axis of its own, logarithmic where its figures lie far apart."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(4.8 * len(columns), 0.8 + 3.6 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey="row")
    panels[0, 0].set_xscale("log", base=2)
    panels[0, 0].xaxis.set_major_formatter(
        lambda length, _: f"{length / 2**10:.0f}K" if length < 1 << 20 else f"{length / 2**20:.0f}M"
    )
    handles = {}
    for (ylabel, lines), (first, *others) in zip(rows.items(), panels, strict=True):
        for axes, its in zip((first, *others), lines, strict=True):
            for label, points, style in its:
                (handles[label],) = axes.plot(*zip(*points, strict=True), label=label, **style)
            axes.grid(alpha=0.3)
        first.set_ylabel(ylabel)
        figures = [figure for its in lines for _, points, _ in its for _, figure in points]
        if max(figures) > 10 * min(figures):
            first.set_yscale("log")
            first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            first.yaxis.set_major_formatter("{x:,.0f}")
        else:
            first.set_ylim(0, 1.1 * max(figures))
    for axes in panels.flat:
        axes.minorticks_off()
    for axes, name in zip(panels[0], columns, strict=True):
        axes.set_title(name, fontsize="medium")
    for axes in panels[-1]:
        axes.set_xlabel(xlabel)
    columns_of_legend = -(-len(handles) // 2)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns_of_legend, frameon=False
    )
    figure.suptitle(title, fontsize="medium")
    figure.savefig(out, dpi=150, metadata={KEY: digest})


def _title(data: Mapping[str, Any], index: Index) -> str:
    """What was measured where, of the runs alone whose results are drawn."""
    cells = [cell for cell in index.group("main") if cell["batch"] in BATCHES]
    drawn = {cell["key"] for cell in cells}
    used = sorted({result.get("run", 0) for result in data["results"] if result["cell"] in drawn})
    machines = [data["runs"][run]["machine"] for run in used]
    device, torch, commits = (
        ", ".join(dict.fromkeys(machine[name] for machine in machines))
        for name in ("device", "torch", "commit")
    )
    dtypes, ks = (", ".join(sorted({str(cell[name]) for cell in cells})) for name in ("dtype", "k"))
    return f"top-k of {dtypes} rows, k = {ks}: {device}, torch {torch}, commit {commits}"


def _lines(index: Index, batch: int, names: Mapping[str, str]) -> list[Line]:
    cells = index.cells(lambda cell: cell["group"] == "main" and cell["batch"] == batch)
    cells = sorted(cells, key=lambda cell: cell["n"])
    lines: list[Line] = []
    for name, (label, color, marker) in STYLES.items():
        times = [(cell["n"], index.figure(cell["key"], name)) for cell in cells]
        points = [(n, time) for n, time in times if time is not None]
        style: dict[str, Any] = {"marker": marker, "markersize": 5, "linewidth": 1.2, "zorder": 3}
        if name in OURS:
            style |= {"markersize": 4, "linewidth": 2.4, "zorder": 2}
        if name == FLOOR:
            style = {"linestyle": ":", "linewidth": 1.6}
        if points:
            lines.append((label.format(**names), points, style | {"color": color}))
    return lines
