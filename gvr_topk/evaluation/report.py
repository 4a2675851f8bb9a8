"""A replay as tables, plots and JSON: the op on each path, and the paper's kernel beside its figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from gvr_topk.constants import HintReason
from gvr_topk.evaluation.replay import PATHS, ReplayResult, summarize, summarize_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Published:
    """Replay figures of the paper: DeepSeek-V3.2, 9 layers x 2,023 steps, k = 2048, N about 70,690.

    Sections 4.2.2 (passes), 4.2.4 (snap iterations, candidates) and 6.5 (overlap of layers 20-60 and
    of layers 0-1, and of a random hint).
    """

    rows: int = 18_207
    passes_within: tuple[float, float, float, float] = (0.676, 0.843, 0.948, 0.994)
    passes_max: int = 6
    snap_within_5: float = 0.793
    snap_within_8: float = 0.953
    snap_max: int = 20
    candidates: str = "2.6K-3.8K"
    overlap: str = "44 / 1.5 %"
    random_overlap: float = 0.029


PAPER = Published()

NOTE = (
    "* what the configuration asks for. The traces of this project are scores of SmolLM2 under a distilled "
    "indexer, not of DeepSeek. --paper adds the paper's kernel."
)
CPU_NOTE = (
    "Only kernels predict and count: --device cuda adds how often the predicted interval held the k-th "
    "score, passes over the row, and candidates."
)
KERNEL_NOTE = (
    "Every step after the first predicts an interval for the k-th score: path auto from the hint, which is "
    "what the last step left, and no_hint from a sample of the row. If the interval holds the k-th score, "
    "one look at the row is enough; if not, the row is looked at again, or counted in radix rounds, which "
    "settle everything. Candidates are the scores in the interval."
)

PAPER_NOTE = (
    "* what the configuration asks for with path paper_gvr. Offset: added to every position of the last "
    "step's choice, which is the hint. T0, the first threshold, is the mean of the hinted scores, or their "
    "quantile by the hit ratio of the last step. Pass: counting the scores at or above a threshold. Snap: a "
    "round that narrows what is left to k. The model is gvr_topk.evaluation.paper_reference. Paper: "
    "DeepSeek-V3.2 scores, N about 70,690, first threshold the mean of the hint, offset 0; hit ratio of "
    "layers 20-60 / 0-1: compare the shape with it, not the digits."
)

# Okabe-Ito colours: distinguishable without colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_PAPER_COLOUR = "#999999"
_DPI = 150


def build_table(result: ReplayResult) -> Table:
    """Build the table of the op's statistics: a column per path, and on a GPU what its kernels counted."""
    lengths = [record.length for record in result.records]
    title = (
        f"{result.source}: {len(lengths)} steps, n {min(lengths):,} to {max(lengths):,}, "
        f"k {result.k:,}, {result.device}"
    )
    caption = f"{NOTE} {CPU_NOTE if result.device == 'cpu' else KERNEL_NOTE}"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("steps after the first")
    for path in PATHS:
        configured = result.heuristic_enabled and path == result.options.path
        table.add_column(f"{path}*" if configured else path, justify="right")
    columns = [summarize_path(result.selected(index), result.k) for index in range(len(PATHS))]
    rows: list[tuple[str, Callable[[Any], str], str]] = [
        ("steps", _number, "rows"),
        ("last step's choice chosen again", _percent, "hit_ratio"),
        ("hint used", _percent, "used"),
    ]
    of_kernels: list[tuple[str, Callable[[Any], str], str]] = [
        ("interval held the k-th score", _percent, "interval_held"),
        ("missed: second look", _number, "missed"),
        ("radix rounds", _number, "radix_rounds"),
        ("mean passes over the row", _decimal, "passes_mean"),
        ("mean candidates", _number, "candidates_mean"),
        ("most candidates", _number, "candidates_max"),
    ]
    for label, shown, figure in rows + (of_kernels if result.device != "cpu" else []):
        table.add_row(label, *(shown(column[figure]) for column in columns))
    return table


def build_paper_table(result: ReplayResult) -> Table | None:
    """Build the table of the paper's kernel, a column per variant; None if it was not replayed."""
    if not result.variants:
        return None
    lengths = [record.length for record in result.records]
    title = "the paper's kernel on the same steps"
    table = Table(title=title, caption=PAPER_NOTE, title_justify="left", caption_justify="left")
    table.add_column("steps with a hint")
    for variant in result.variants:
        mark = "*" if variant.configured else ""
        table.add_column(f"offset {variant.hint_offset}{mark}\n{variant.guess}", justify="right")
    table.add_column("paper", justify="right")
    columns = [summarize(result.hinted(index)) for index in range(len(result.variants))]
    for label, cell, published in _rows(result.k, lengths):
        table.add_row(label, *(cell(column) for column in columns), published)
    return table


def describe_outcome(result: ReplayResult) -> list[str]:
    """Return lines on the gate's decisions, the op's reasons, exactness, the oracle, and where the op ran."""
    count = len(result.records)
    exact = sum(record.exact for record in result.records)
    paper = sum(record.paper_exact for record in result.records)
    of_paper = f", the paper's four phases {paper} of {count} steps" if result.variants else ""
    ran = f"its kernels on {result.device}"
    if result.device == "cpu":
        ran = "its CPU implementation: no kernel ran (--device cuda runs them)"
    return [
        f"gate: {_count_words(record.gate for record in result.records)}",
        f"op: {_count_words(record.op_stats.reason.name.lower() for record in result.records)}",
        f"exact: op on every path {exact} of {count} steps{of_paper}",
        "oracle: a sort in NumPy, which shares no code with the op",
        f"the op ran {ran}",
    ]


def save_json(result: ReplayResult, folder: Path) -> Path:
    """Write ``<source>.json`` into `folder`; layout as `ReplayResult.to_dict`."""
    path = folder / f"{result.source}.json"
    path.write_text(json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def save_plots(result: ReplayResult, folder: Path) -> list[Path]:
    """Write plots as PNG into `folder`: hit ratio, the kernels' candidates, the paper's passes."""
    plots: list[tuple[str, Callable[[Axes, ReplayResult], None], int]] = [("hit_ratio", _plot_hit_ratio, 3)]
    if result.device != "cpu":
        plots.append(("candidates", _plot_candidates, 2))
    if result.variants:
        plots.append(("passes", _plot_passes, 3))
    # The object interface and not pyplot: no global state and no display is needed.
    from matplotlib.figure import Figure

    paths = []
    for name, draw, columns in plots:
        figure = Figure(figsize=(8.0, 4.6), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        draw(axes, result)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, frameon=False)
        path = folder / f"{result.source}_{name}.png"
        figure.savefig(path, dpi=_DPI)
        paths.append(path)
    return paths


def _rows(k: int, lengths: list[int]) -> list[tuple[str, Callable[[dict[str, Any]], str], str]]:
    """Return for each row its label, the cell of a variant as a function, and the paper's figure."""

    def within(index: int) -> Callable[[dict[str, Any]], str]:
        return lambda column: _percent(column["passes_within"][index])

    chance = _percent(k / float(np.mean(lengths)))
    return [
        ("steps", lambda c: str(c["rows"]), f"{PAPER.rows:,}"),
        ("hit ratio", lambda c: _percent(c["hit_ratio_mean"]), PAPER.overlap),
        ("of a random hint", lambda c: chance, _percent(PAPER.random_overlap)),
        ("done in 1 pass", within(0), _percent(PAPER.passes_within[0])),
        ("within 2 passes", within(1), _percent(PAPER.passes_within[1])),
        ("within 3 passes", within(2), _percent(PAPER.passes_within[2])),
        ("within 4 passes", within(3), _percent(PAPER.passes_within[3])),
        ("most passes", lambda c: _number(c["passes_max"]), str(PAPER.passes_max)),
        ("mean candidates", lambda c: _number(c["candidates_mean"]), PAPER.candidates),
        ("median candidates", lambda c: _number(c["candidates_median"]), ""),
        ("within 5 snaps", lambda c: _percent(c["snap_within_5"]), _percent(PAPER.snap_within_5)),
        ("within 8 snaps", lambda c: _percent(c["snap_within_8"]), _percent(PAPER.snap_within_8)),
        ("most snaps", lambda c: _number(c["snap_max"]), str(PAPER.snap_max)),
    ]


def _count_words(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _plot_hit_ratio(axes: Axes, result: ReplayResult) -> None:
    shown = [
        (record.step, record.paths[0].hits / result.k)
        for record in result.records[1:]
        if record.paths[0].hits >= 0 and record.paths[0].reason is not HintReason.SHORT_ROW
    ]
    if shown:
        steps, ratio = zip(*shown, strict=True)
        offset = result.options.hint_offset
        label = f"offset {offset} (mean {_percent(float(np.mean(ratio)))})"
        axes.plot(steps, ratio, color=_COLOURS[0], linewidth=1.4, label=label)
    chance = result.k / float(np.mean([record.length for record in result.records]))
    axes.axhline(
        chance, color="black", linestyle=":", linewidth=1, label=f"random hint (K/N {_percent(chance)})"
    )
    axes.set(
        title=f"{result.source}: share of the previous top-{result.k} still in the top-{result.k}",
        xlabel="decode step",
        ylabel="hit ratio",
    )
    # The axis ends just above the highest ratio, so that low ratios can be told apart.
    axes.set_ylim(0, min(1.0, 1.15 * max([chance, *(ratio for _, ratio in shown)])))


def _plot_passes(axes: Axes, result: ReplayResult) -> None:
    published = np.diff([0.0, *PAPER.passes_within, 1.0])
    groups = [
        (variant.label, [row.passes for row in result.hinted(index)], _COLOURS[index % len(_COLOURS)])
        for index, variant in enumerate(result.variants)
    ]
    most = 5
    width = 0.85 / (len(groups) + 1)
    place = np.arange(1, most + 1)
    for index, (label, passes, colour) in enumerate(groups):
        clipped = np.minimum(passes, most).astype(int)
        share = np.bincount(clipped, minlength=most + 1)[1:] / max(1, len(passes))
        axes.bar(place + (index - len(groups) / 2) * width, share, width, color=colour, label=label)
    axes.bar(
        place + len(groups) / 2 * width,
        published,
        width,
        color=_PAPER_COLOUR,
        hatch="//",
        edgecolor="white",
        label="paper (DeepSeek-V3.2)",
    )
    axes.set(
        title=f"{result.source}: counting passes over the row, by hint offset and first guess",
        xlabel="passes",
        ylabel="share of steps",
        ylim=(0, 1.05),
        xticks=place,
        xticklabels=[*map(str, place[:-1]), f"{most} or more"],
    )


def _plot_candidates(axes: Axes, result: ReplayResult) -> None:
    for index, path in enumerate(("auto", "no_hint")):  # radix rounds predict nothing that could be missed
        rows = [(record.step, record.paths[PATHS.index(path)]) for record in result.records[1:]]
        found = [(step, row.candidates, row.guess_hit) for step, row in rows if row.passes]
        if found:
            steps, candidates, hits = (np.array(column) for column in zip(*found, strict=True))
            missed = hits == 0
            colour = _COLOURS[index]
            axes.plot(steps, candidates, color=colour, linewidth=1.2, label=path)
            label = f"{path}: missed, second look ({missed.sum()})"
            axes.plot(steps[missed], candidates[missed], "x", color=colour, label=label)
    axes.set(
        title=f"{result.source}: scores in the interval that is searched for the k-th",
        xlabel="decode step",
        ylabel="candidates",
    )
    axes.set_ylim(bottom=0)
