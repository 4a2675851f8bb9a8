"""Table of the TPOT comparison, with the paper's figures beside."""

import math
import statistics
from collections.abc import Sequence

from eval.campaigns.runs import Comparison
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


def reduction(item: Comparison) -> tuple[float, float | None, float | None] | None:
    """Relative reduction of TPOT, ``1 - on / off``, with the ends of its interval, from the logarithms."""
    got = item.decision
    if got.difference is None:
        return None
    low, high = (None if end is None else -math.expm1(end) for end in (got.high, got.low))
    return -math.expm1(got.difference), low, high


def tpot_table(comparisons: Sequence[Comparison]) -> str:
    """Mean TPOT and draft acceptance of both sides, the reduction, the verdict and the paper's figures."""
    rows = []
    for item in comparisons:
        mtp, prompt = item.case["MTP"], item.case["prompt"]
        measured, published, dar = reduction(item), PAPER.get((mtp, prompt)), PAPER_DAR.get((mtp, prompt))
        cell = "-" if measured is None else f"{100 * measured[0]:.2f} %"
        if measured is not None and measured[1] is not None and measured[2] is not None:
            cell += f" [{100 * measured[1]:.2f}, {100 * measured[2]:.2f}]"
        paper = "-" if published is None else f"{100 * (1 - sum(published[1]) / sum(published[0])):.2f} %"
        rows.append(
            [
                *(str(mtp), prompt, str(item.decision.repetitions)),
                *(_mean(side, 4) for side in (item.off, item.on)),
                *(cell, item.decision.verdict, paper),
                *(_mean(side, 3) for side in (item.acceptance_off, item.acceptance_on)),
                f"{dar[0]:.2f} -> {dar[1]:.2f}" if dar else "-",
            ]
        )
    headers = ["MTP", "prompt", "runs", "off, ms", "on, ms", "reduction [95 %, all cases and looks]"]
    headers += ["verdict", "paper", "accepted drafts off", "on", "paper"]
    return markdown_table(headers, rows)


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else "-"
