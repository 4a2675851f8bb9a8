"""The two rules by which evaluations decide, over all tasks or cases of a campaign together.

Both work on arrays with any leading axes, so that one campaign and the simulation of thousands go through
the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from eval.campaigns.sequential import Floats, Look, holm, p_above, p_below

ERROR_RATE = 0.05
"""Chance of any false verdict of a kind in a whole campaign: over all tasks, and however often runs are
added. It holds for "within" and for "regression" separately, and for "faster" and "slower" together."""

Noninferiority = Literal["within", "regression", "inconclusive"]
Comparison = Literal["faster", "slower", "open"]

Masks = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Judgement:
    """Two opposite claims about each task or case, the last axis of both arrays.

    Attributes
    ----------
    p_good, p_bad : ndarray
        Adjusted p-values of the claims: small where the claim holds.
    """

    p_good: Floats
    p_bad: Floats

    @property
    def good(self) -> Masks:
        """Where the good claim is shown. Looks that contradict each other show nothing."""
        return np.asarray((self.p_good <= ERROR_RATE) & (self.p_bad > ERROR_RATE))

    @property
    def bad(self) -> Masks:
        """Where the bad claim is shown."""
        return np.asarray((self.p_bad <= ERROR_RATE) & (self.p_good > ERROR_RATE))


def judge_noninferiority(
    looks: Sequence[Sequence[Look]], margins: Sequence[float], family: int | None = None
) -> Judgement:
    """Judge whether the loss of each task is smaller than its margin ("within") or larger ("regression").

    Parameters
    ----------
    looks : sequence of sequences of Look
        Per task, from `eval.campaigns.sequential.looks_at`, on scores of which more is better.
    margins : sequence of float
        Per task, the largest loss that is accepted; positive.
    family : int, optional
        Tasks of the campaign, where not all are judged now.
    """
    for margin in margins:
        if not margin > 0:
            raise ValueError(f"margin: wanted a positive number, got {margin}")
    within = [p_above(task, _like(task, -margin)) for task, margin in zip(looks, margins, strict=True)]
    regression = [p_below(task, _like(task, -margin)) for task, margin in zip(looks, margins, strict=True)]
    return Judgement(holm(np.stack(within, axis=-1), family), holm(np.stack(regression, axis=-1), family))


def judge_difference(looks: Sequence[Sequence[Look]], family: int | None = None) -> Judgement:
    """Judge whether "on" is faster in each case (the good claim) or slower, from logarithms of times.

    Both claims share one error rate: each p-value is doubled, and Holm's adjustment runs over the cases.
    """
    faster = [p_below(case, _like(case, 0.0)) for case in looks]
    slower = [p_above(case, _like(case, 0.0)) for case in looks]
    either = [np.minimum(1.0, 2 * np.minimum(a, b)) for a, b in zip(faster, slower, strict=True)]
    adjusted = holm(np.stack(either, axis=-1), family)
    is_faster = np.stack([a < b for a, b in zip(faster, slower, strict=True)], axis=-1)
    return Judgement(np.where(is_faster, adjusted, 1.0), np.where(is_faster, 1.0, adjusted))


def noninferiority_verdicts(judgement: Judgement) -> list[Noninferiority]:
    """Verdict of each task of one campaign."""
    return [
        "within" if good else "regression" if bad else "inconclusive"
        for good, bad in zip(judgement.good.tolist(), judgement.bad.tolist(), strict=True)
    ]


def comparison_verdicts(judgement: Judgement) -> list[Comparison]:
    """Verdict of each case of one campaign."""
    return [
        "faster" if good else "slower" if bad else "open"
        for good, bad in zip(judgement.good.tolist(), judgement.bad.tolist(), strict=True)
    ]


def _like(looks: Sequence[Look], value: float) -> Floats:
    return np.full(looks[0].difference.shape if looks else (), value)
