"""In which order the two variants take turns."""

from __future__ import annotations

from typing import Literal

Variant = Literal["off", "on"]
Order = Literal["abba", "alternate"]


def variant_order(repetitions: int, order: Order) -> list[tuple[int, Variant]]:
    """Sequence of (repetition from 1, variant).

    ``alternate`` is off on, off on, ... as in the paper. ``abba`` turns every second pair round. What a
    steady drift of the machine leaves in either order, the analysis removes
    (`eval.campaigns.sequential.drift_free_difference`); in ``abba`` order that costs next to no precision.
    """
    sequence: list[tuple[int, Variant]] = []
    for repetition in range(1, repetitions + 1):
        pair: list[Variant] = ["off", "on"]
        if order == "abba" and repetition % 2 == 0:
            pair.reverse()
        sequence += [(repetition, variant) for variant in pair]
    return sequence
