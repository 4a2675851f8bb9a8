"""Tables and plot of the TPOT comparison, with the paper's figures beside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.common.plan import Variant
from eval.common.stats import Interval, difference_interval, mean_interval, reduction_interval
from eval.common.tables import markdown_table

PAPER = {
    (0, "64K"): ((10.8161, 10.8509, 10.8785), (10.2708, 10.2367, 10.2593)),
    (0, "100K"): ((11.4964, 11.5023, 11.5316), (10.6522, 10.6438, 10.6359)),
    (1, "64K"): ((6.5508, 6.5188, 6.5032), (6.2436, 6.2207, 6.2561)),
    (1, "100K"): ((7.4759, 7.6306, 7.6171), (7.0760, 7.1353, 7.0796)),
    (3, "64K"): ((5.1900, 5.2674, 5.1760), (5.0277, 5.1663, 5.0635)),
    (3, "100K"): ((5.5394, 5.5781, 5.7050), (5.5157, 5.3746, 5.3520)),
}
"""TPOT in ms of the paper's three repetitions, off and on, by MTP setting and prompt (table 12)."""

PAPER_DAR = {
    (1, "64K"): (0.92, 0.93),
    (1, "100K"): (0.89, 0.89),
    (3, "64K"): (0.61, 0.61),
    (3, "100K"): (0.59, 0.58),
}
"""Mean draft acceptance rate in the paper, off and on (table 13)."""


@dataclass(frozen=True)
class Case:
    """What one row of the table compares."""

    mtp: int
    label: str


@dataclass(frozen=True)
class Row:
    """Result of one case. TPOT in ms, acceptance as a share; one value per repetition."""

    case: Case
    off: tuple[float, ...]
    on: tuple[float, ...]
    acceptance_off: tuple[float, ...]
    acceptance_on: tuple[float, ...]

    @property
    def reduction(self) -> Interval | None:
        """Relative reduction of TPOT; None until both sides have a run."""
        return reduction_interval(self.off, self.on) if self.off and self.on else None


def collect_rows(cases: Sequence[Case], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Group the figures of finished runs by case, in the order of the repetitions."""

    def values(case: Case, variant: Variant, figure: str) -> tuple[float, ...]:
        wanted = {"MTP": case.mtp, "prompt": case.label, "variant": variant}
        chosen = [record for record in records if wanted.items() <= record["labels"].items()]
        chosen.sort(key=lambda record: record["labels"]["repetition"])
        return tuple(
            record["figures"][figure] for record in chosen if record["figures"].get(figure) is not None
        )

    return [
        Row(
            case,
            values(case, "off", "tpot_ms"),
            values(case, "on", "tpot_ms"),
            values(case, "off", "acceptance"),
            values(case, "on", "acceptance"),
        )
        for case in cases
    ]


def tpot_table(rows: Sequence[Row]) -> str:
    """TPOT per repetition with means, intervals and the paper's reduction."""
    count = max((max(len(row.off), len(row.on)) for row in rows), default=0)
    headers = ["MTP", "prompt"]
    headers += [f"off R{index + 1}" for index in range(count)] + [
        f"on R{index + 1}" for index in range(count)
    ]
    headers += ["mean off [95 %]", "mean on [95 %]", "reduction [95 %]", "paper"]
    body = [
        [
            str(row.case.mtp),
            row.case.label,
            *_cells(row.off, count, 4),
            *_cells(row.on, count, 4),
            _mean_cell(row.off, 4),
            _mean_cell(row.on, 4),
            _percent_cell(row.reduction),
            _paper_cell(row.case),
        ]
        for row in rows
    ]
    return "TPOT, ms\n" + markdown_table(headers, body)


def acceptance_table(rows: Sequence[Row]) -> str:
    """Draft acceptance per repetition; empty when no run speculates."""
    rows = [row for row in rows if row.acceptance_off or row.acceptance_on]
    if not rows:
        return ""
    count = max(max(len(row.acceptance_off), len(row.acceptance_on)) for row in rows)
    headers = ["MTP", "prompt"]
    headers += [f"off R{index + 1}" for index in range(count)] + [
        f"on R{index + 1}" for index in range(count)
    ]
    headers += ["mean off", "mean on", "difference [95 %]", "paper"]
    body = []
    for row in rows:
        paper = PAPER_DAR.get((row.case.mtp, row.case.label))
        difference = "-"
        if row.acceptance_off and row.acceptance_on:
            interval, _ = difference_interval(row.acceptance_off, row.acceptance_on)
            difference = f"{interval.value:+.3f}{_ends(interval, '+.3f')}"
        body.append(
            [
                str(row.case.mtp),
                row.case.label,
                *_cells(row.acceptance_off, count, 3),
                *_cells(row.acceptance_on, count, 3),
                f"{mean_interval(row.acceptance_off).value:.3f}" if row.acceptance_off else "-",
                f"{mean_interval(row.acceptance_on).value:.3f}" if row.acceptance_on else "-",
                difference,
                f"{paper[0]:.2f} -> {paper[1]:.2f}" if paper else "-",
            ]
        )
    return "Draft acceptance rate\n" + markdown_table(headers, body)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of TPOT off and on, and the reduction with its interval beside the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.off and row.on]
    names = [f"MTP {row.case.mtp}\n{row.case.label}" for row in rows]
    places = range(len(rows))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(max(8.0, 2.2 * len(rows)), 4), layout="constrained"
    )
    for shift, label, side in ((-0.2, "off", "off"), (0.2, "on", "on")):
        intervals = [mean_interval(getattr(row, side)) for row in rows]
        left.bar(
            [place + shift for place in places],
            [interval.value for interval in intervals],
            width=0.38,
            yerr=[_finite(interval.half_width) for interval in intervals],
            capsize=3,
            label=label,
        )
    left.set_ylabel("TPOT, ms")
    left.set_xticks(list(places), names)
    left.legend(title="heuristic top-k", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    reductions = [reduction_interval(row.off, row.on) for row in rows]
    right.errorbar(
        list(places),
        [100 * item.value for item in reductions],
        yerr=[
            [100 * _finite(item.value - item.low) for item in reductions],
            [100 * _finite(item.high - item.value) for item in reductions],
        ],
        fmt="o",
        capsize=4,
        label="measured",
    )
    known = [
        (place, paper)
        for place, row in zip(places, rows, strict=True)
        if (paper := paper_reduction(row.case)) is not None
    ]
    if known:
        right.plot(
            [place for place, _ in known],
            [100 * value for _, value in known],
            "x",
            color="gray",
            label="paper (8 B200, NVFP4)",
        )
    right.axhline(0, color="black", linewidth=0.8)
    right.set_ylabel("TPOT reduction, %")
    right.set_xticks(list(places), names)
    right.set_xlim(-0.5, len(rows) - 0.5)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def paper_reduction(case: Case) -> float | None:
    """Relative TPOT reduction in the paper; None for a case it does not have."""
    values = PAPER.get((case.mtp, case.label))
    return None if values is None else 1 - sum(values[1]) / sum(values[0])


def _cells(values: Sequence[float], count: int, digits: int) -> list[str]:
    return [f"{value:.{digits}f}" for value in values] + ["-"] * (count - len(values))


def _mean_cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    interval = mean_interval(values)
    return f"{interval.value:.{digits}f}{_ends(interval, f'.{digits}f')}"


def _percent_cell(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    scaled = Interval(100 * interval.value, 100 * interval.low, 100 * interval.high)
    return f"{scaled.value:.2f} %{_ends(scaled, '.2f')}"


def _paper_cell(case: Case) -> str:
    reduction = paper_reduction(case)
    return "-" if reduction is None else f"{100 * reduction:.2f} %"


def _ends(interval: Interval, form: str) -> str:
    return "" if math.isnan(interval.low) else f" [{interval.low:{form}}, {interval.high:{form}}]"


def _finite(value: float) -> float:
    return 0.0 if math.isnan(value) else value
