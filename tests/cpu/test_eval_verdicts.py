"""Which verdict two opposite claims give."""

from __future__ import annotations

import numpy as np
import pytest

from eval.campaigns.verdicts import ERROR_RATE, Judgement, comparison_verdicts, noninferiority_verdicts

ABOVE = ERROR_RATE * 1.01


@pytest.mark.parametrize(
    ("p_good", "p_bad", "comparison", "noninferiority"),
    [
        (0.0, 1.0, "faster", "within"),
        (1.0, 0.0, "slower", "regression"),
        (ERROR_RATE, ABOVE, "faster", "within"),
        (ABOVE, ERROR_RATE, "slower", "regression"),
        (1.0, 1.0, "open", "inconclusive"),
        (ABOVE, ABOVE, "open", "inconclusive"),
        (0.0, 0.0, "open", "inconclusive"),  # looks that contradict each other
        (ERROR_RATE, ERROR_RATE, "open", "inconclusive"),
    ],
)
def test_verdict_of_two_claims(p_good: float, p_bad: float, comparison: str, noninferiority: str) -> None:
    judgement = Judgement(np.array([p_good, 1.0]), np.array([p_bad, 1.0]))
    assert comparison_verdicts(judgement) == [comparison, "open"]
    assert noninferiority_verdicts(judgement) == [noninferiority, "inconclusive"]
