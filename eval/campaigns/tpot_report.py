"""Tables and plot of the TPOT comparison, with the paper's figures beside."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.campaigns.order import Order, Variant
from eval.campaigns.pairing import complete_pairs, figures_by_repetition
from eval.campaigns.power import detectable_difference, repetitions_needed
from eval.campaigns.sequential import (
    LEAST_REPETITIONS,
    WARM_UP_RATE,
    WARM_UP_REMARK,
    bounds,
    drift_free_difference,
    looks_at,
    warm_up_p,
)
from eval.campaigns.stats import relative_sd
from eval.campaigns.verdicts import ERROR_RATE, Comparison, comparison_verdicts, judge_difference
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


_SIDES: tuple[Variant, ...] = ("off", "on")
_EFFECTS = (1.0, 2.0, 5.0)
"""Per cent, for which the repetitions needed are said before the first run."""


@dataclass(frozen=True)
class Case:
    """What one row of the table compares."""

    mtp: int
    label: str


@dataclass(frozen=True)
class Reduction:
    """Relative reduction of TPOT, ``1 - on / off``, as a share.

    Attributes
    ----------
    value : float
        From the logarithms, a linear drift removed once there are runs enough to fit it.
    low, high : float or None
        Ends of the interval that holds over all cases and looks; None before the first look.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Row:
    """Result of one case. TPOT in ms, acceptance as a share; one value per repetition.

    `reduction` is None until one repetition has both sides. `warms_up` says that a warm-up shows in the order
    of the runs; it is noise to the verdict.
    """

    case: Case
    off: tuple[float, ...]
    on: tuple[float, ...]
    acceptance_off: tuple[float, ...]
    acceptance_on: tuple[float, ...]
    reduction: Reduction | None = None
    verdict: Comparison = "open"
    warms_up: bool = False


def collect_rows(
    cases: Sequence[Case], records: Sequence[Mapping[str, Any]], order: Order, family: int
) -> list[Row]:
    """Group the figures of finished runs by case, and judge all cases together.

    Parameters
    ----------
    cases : sequence of Case
    records : sequence of mapping
        Finished runs.
    order : str
        In which order the variants took turns.
    family : int
        Cases of the campaign; at least those given.
    """
    labels = [{"MTP": case.mtp, "prompt": case.label} for case in cases]
    pairs = [complete_pairs(records, label, "tpot_ms") for label in labels]
    logs = [([math.log(value) for value in off], [math.log(value) for value in on]) for off, on in pairs]
    looks = [looks_at(off, on, order) for off, on in logs]
    verdicts = comparison_verdicts(judge_difference(looks, family))
    rows = []
    for index, (case, label) in enumerate(zip(cases, labels, strict=True)):
        reduction = None
        off, on = logs[index]
        if off:
            difference = statistics.fmean(on) - statistics.fmean(off)
            if len(off) >= LEAST_REPETITIONS:
                difference = float(drift_free_difference(off, on, order).difference)
            # Each end of a two-sided interval has half of this case's error rate.
            low, high = (float(end) for end in bounds(looks[index], ERROR_RATE / 2 / family))
            reduction = Reduction(
                1 - math.exp(difference),
                1 - math.exp(high) if looks[index] else None,
                1 - math.exp(low) if looks[index] else None,
            )
        values = {
            (variant, figure): tuple(
                figures_by_repetition(records, {**label, "variant": variant}, figure).values()
            )
            for variant in _SIDES
            for figure in ("tpot_ms", "acceptance")
        }
        rows.append(
            Row(
                case,
                values["off", "tpot_ms"],
                values["on", "tpot_ms"],
                values["off", "acceptance"],
                values["on", "acceptance"],
                reduction,
                verdicts[index],
                bool(warm_up_p(off, on, order) <= WARM_UP_RATE),
            )
        )
    return rows


def describe_power(cases: Sequence[Case], repetitions: int, order: Order, family: int) -> str:
    """What so many repetitions can show at the paper's spread, said before the first of them.

    Every line is a comment, so that the output of ``--dry-run`` stays a shell script.
    """
    rate = ERROR_RATE / 2 / family
    rows = []
    for mtp in sorted({case.mtp for case in cases}):
        sd = paper_sd(mtp)
        shown = detectable_difference(sd, repetitions, order, rate)
        needed = [repetitions_needed(sd, percent / 100, order, rate) for percent in _EFFECTS]
        rows.append(
            [
                str(mtp),
                f"{100 * sd:.2f} %",
                "-" if shown is None else f"{100 * shown:.1f} %",
                *("more than 32" if count is None else str(count) for count in needed),
            ]
        )
    headers = ["MTP", "spread of a run (paper)", f"shown by {repetitions}"]
    headers += [f"repetitions for {percent:g} %" for percent in _EFFECTS]
    lines = [
        "Power at the paper's spread: differences of TPOT that are shown in 90 % of campaigns.",
        *markdown_table(headers, rows).splitlines(),
        f"Chance of any false one in {family} cases: at most {100 * ERROR_RATE:.0f} %, even if runs follow.",
    ]
    return "\n".join(f"# {line}" for line in lines)


def paper_sd(mtp: int) -> float:
    """Standard deviation of the paper's repetitions with this MTP setting, relative; else of all of them."""
    groups = [side for (setting, _), sides in PAPER.items() for side in sides if setting == mtp]
    return relative_sd(groups or [side for sides in PAPER.values() for side in sides])


def tpot_table(rows: Sequence[Row]) -> str:
    """TPOT per repetition with means, reduction, verdict and the paper's reduction."""
    count = max((max(len(row.off), len(row.on)) for row in rows), default=0)
    headers = ["MTP", "prompt"]
    headers += [f"off R{index + 1}" for index in range(count)] + [
        f"on R{index + 1}" for index in range(count)
    ]
    headers += ["mean off", "mean on", "reduction [95 %, all cases and looks]", "verdict", "paper"]
    body = [
        [
            str(row.case.mtp),
            row.case.label,
            *_cells(row.off, count, 4),
            *_cells(row.on, count, 4),
            _mean_cell(row.off, 4),
            _mean_cell(row.on, 4),
            _reduction_cell(row.reduction),
            row.verdict,
            _paper_cell(row.case),
        ]
        for row in rows
    ]
    warming = [row.case for row in rows if row.warms_up]
    remarks = [f"\nMTP {case.mtp}, {case.label}: {WARM_UP_REMARK}" for case in warming]
    return "TPOT, ms\n" + markdown_table(headers, body) + "".join(remarks)


def acceptance_table(rows: Sequence[Row]) -> str:
    """Draft acceptance per repetition, as a description without a verdict; empty when no run speculates."""
    rows = [row for row in rows if row.acceptance_off or row.acceptance_on]
    if not rows:
        return ""
    count = max(max(len(row.acceptance_off), len(row.acceptance_on)) for row in rows)
    headers = ["MTP", "prompt"]
    headers += [f"off R{index + 1}" for index in range(count)] + [
        f"on R{index + 1}" for index in range(count)
    ]
    headers += ["mean off", "mean on", "difference", "paper"]
    body = []
    for row in rows:
        paper = PAPER_DAR.get((row.case.mtp, row.case.label))
        difference = "-"
        if row.acceptance_off and row.acceptance_on:
            gap = statistics.fmean(row.acceptance_on) - statistics.fmean(row.acceptance_off)
            difference = f"{gap:+.3f}"
        body.append(
            [
                str(row.case.mtp),
                row.case.label,
                *_cells(row.acceptance_off, count, 3),
                *_cells(row.acceptance_on, count, 3),
                _mean_cell(row.acceptance_off, 3),
                _mean_cell(row.acceptance_on, 3),
                difference,
                f"{paper[0]:.2f} -> {paper[1]:.2f}" if paper else "-",
            ]
        )
    return "Draft acceptance rate\n" + markdown_table(headers, body)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of TPOT off and on with the range of the repetitions, and the reduction beside the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(row, row.reduction) for row in rows if row.reduction is not None]
    rows = [row for row, _ in shown]
    names = [f"MTP {row.case.mtp}\n{row.case.label}" for row in rows]
    places = range(len(rows))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(max(8.0, 2.2 * len(rows)), 4), layout="constrained"
    )
    for shift, label in ((-0.2, "off"), (0.2, "on")):
        values = [row.off if label == "off" else row.on for row in rows]
        means = [statistics.fmean(item) for item in values]
        left.bar(
            [place + shift for place in places],
            means,
            width=0.38,
            yerr=[
                [mean - min(item) for mean, item in zip(means, values, strict=True)],
                [max(item) - mean for mean, item in zip(means, values, strict=True)],
            ],
            capsize=3,
            label=label,
        )
    left.set_ylabel("TPOT, ms (bars: smallest to largest)")
    left.set_xticks(list(places), names)
    left.legend(title="heuristic top-k", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    right.errorbar(
        list(places),
        [100 * item.value for _, item in shown],
        yerr=[
            [0.0 if item.low is None else 100 * max(0.0, item.value - item.low) for _, item in shown],
            [0.0 if item.high is None else 100 * max(0.0, item.high - item.value) for _, item in shown],
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
    return f"{statistics.fmean(values):.{digits}f}" if values else "-"


def _reduction_cell(reduction: Reduction | None) -> str:
    if reduction is None:
        return "-"
    if reduction.low is None or reduction.high is None:
        return f"{100 * reduction.value:.2f} %"
    return f"{100 * reduction.value:.2f} % [{100 * reduction.low:.2f}, {100 * reduction.high:.2f}]"


def _paper_cell(case: Case) -> str:
    reduction = paper_reduction(case)
    return "-" if reduction is None else f"{100 * reduction:.2f} %"
