"""Repetitions of which both variants are finished, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def figures_by_repetition(
    records: Sequence[Mapping[str, Any]], labels: Mapping[str, Any], figure: str
) -> dict[int, float]:
    """A figure of the finished runs that carry these labels, by repetition; runs without it are left out."""
    chosen = [record for record in records if labels.items() <= record["labels"].items()]
    chosen.sort(key=lambda record: record["labels"]["repetition"])
    return {
        record["labels"]["repetition"]: record["figures"][figure]
        for record in chosen
        if record["figures"].get(figure) is not None
    }


def complete_pairs(
    records: Sequence[Mapping[str, Any]], labels: Mapping[str, Any], figure: str
) -> tuple[list[float], list[float]]:
    """Figures off and on of the repetitions before the first that lacks one.

    Later ones wait until the gap is filled: were they used, a run that fails would choose which
    repetitions a verdict rests on.
    """
    off = figures_by_repetition(records, {**labels, "variant": "off"}, figure)
    on = figures_by_repetition(records, {**labels, "variant": "on"}, figure)
    count = 0
    while count + 1 in off and count + 1 in on:
        count += 1
    return [off[index + 1] for index in range(count)], [on[index + 1] for index in range(count)]
