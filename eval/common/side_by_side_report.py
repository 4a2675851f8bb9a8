"""What the runs of several versions say: medians, ratios, what went wrong, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.common.status import REGRESSION, UNDECIDED
from eval.common.tables import markdown_table

TREE = "working tree"
"""Name of the version that every other is compared with."""


@dataclass(frozen=True)
class Run:
    """One version in one round.

    Attributes
    ----------
    version : str
        Its name.
    round : int
        From 1.
    api : str
        How it carries a state; empty where it did not get so far.
    results : sequence of dict
        Those of `eval.common.side_by_side_worker.measure`, each with its ``cell`` and ``way``.
    problem : str
        Why there are no results; empty where there are.
    """

    version: str
    round: int
    api: str = ""
    results: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    problem: str = ""

    @property
    def summary(self) -> str:
        """The run in a line."""
        if self.problem:
            return self.problem.partition("\n")[0]
        exact = sum(result["us"] is not None and not result["wrong"] for result in self.results)
        return f"{exact} of {len(self.results)} figures with exact results"


def figures(names: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Figures by cell and way to call, in the order in which they were measured.

    Parameters
    ----------
    names : sequence of str
        Versions, the working tree first.
    runs : sequence of Run

    Returns
    -------
    list of dict
        ``cell`` and ``way``; ``us``, each version's median over the rounds; ``rounds_us``, what it is the
        median of; ``ratio``, the first version's median over the second one's. A time whose results were not
        exact counts for nothing, and where nothing is left a median and a ratio are None.
    """
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in runs:
        for result in run.results:
            by_version = times.setdefault((result["cell"], result["way"]), {name: [] for name in names})
            if result["us"] is not None and not result["wrong"]:
                by_version[run.version].append(result["us"])
    found = []
    for (cell, way), rounds in times.items():
        us = {name: round(statistics.median(of), 4) if of else None for name, of in rounds.items()}
        found.append({"cell": cell, "way": way, "us": us, "ratio": _ratio(names, us), "rounds_us": rounds})
    return found


def _ratio(names: Sequence[str], us: Mapping[str, float | None]) -> float | None:
    """The first version's time over the second one's."""
    ours, theirs = us[names[0]], us[names[1]]
    return None if ours is None or theirs is None else round(ours / theirs, 4)


def largest_ratio(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The row in which the working tree does worst, as ``cell``, ``way`` and ``ratio``; None without any."""
    with_ratio = [row for row in rows if row["ratio"] is not None]
    if not with_ratio:
        return None
    worst = max(with_ratio, key=lambda row: row["ratio"])
    return {name: worst[name] for name in ("cell", "way", "ratio")}


def problems(runs: Sequence[Run]) -> list[str]:
    """Everything that went wrong, a line or more for each."""
    found = []
    for run in runs:
        who = f"{run.version}, round {run.round}"
        if run.problem:
            found.append(f"{who}: {run.problem}")
        for result in run.results:
            where = f"{who}, {result['cell']}, {result['way']}"
            if result["wrong"]:
                found.append(f"{where}: {result['wrong']} of {result['rows']} compared rows are wrong")
            if result["note"]:
                found.append(f"{where}: {result['note']}")
    return found


def verdict(runs: Sequence[Run]) -> int:
    """Exit code: a wrong row outweighs a version that failed."""
    if any(result["wrong"] for run in runs for result in run.results):
        return REGRESSION
    return UNDECIDED if problems(runs) else 0


def table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds per launch of every version, and the ratio, by cell and way to call; the largest below."""
    headers = ["us per launch", "the op gets", *names, "ratio"]
    lines = [
        [
            row["cell"],
            row["way"],
            *("-" if row["us"][name] is None else f"{row['us'][name]:.2f}" for name in names),
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
        ]
        for row in rows
    ]
    worst = largest_ratio(rows)
    said = "none" if worst is None else f"{worst['ratio']:.3f} ({worst['cell']}, {worst['way']})"
    return f"{markdown_table(headers, lines)}\n\nlargest ratio of {names[0]} to {names[1]}: {said}"
