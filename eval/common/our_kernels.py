"""Our op bound to benchmark rows, each launch with the hint of the step before."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.baselines import POISON, Prepared
from eval.kernel_timing import Rows
from gvr_topk.contract import STATS_COLUMNS
from gvr_topk.ops import indexer_topk_decode

PHASE_STAMPS = 8


def prepare_ours(
    rows: Rows,
    path: str,
    *,
    hinted: bool = True,
    quantile: bool = False,
    ctas_per_row: int = 0,
    pdl: bool = False,
    clocks: Tensor | None = None,
) -> Prepared:
    """Bind one path of the op to rows.

    Parameters
    ----------
    rows : Rows
        The hint of a launch is the result of the other step of its pair, as soon as that has run.
    path : str
        As for `gvr_topk.indexer_topk_decode`.
    hinted : bool
        Without it the op gets no prior.
    quantile : bool
        First threshold of the four-phase kernel from the quantile.
    ctas_per_row : int
        0 follows the plan.
    pdl : bool
        Launch each call while the one before is still running.
    clocks : Tensor, ``[count, batch, PHASE_STAMPS]``, int64, optional
        Where a library built with ``GVR_PHASE_TIMING`` writes its stamps.
    """
    count, batch, _ = rows.logits.shape
    device = rows.logits.device
    results = torch.full((count, batch, rows.k), POISON, dtype=torch.int32, device=device)
    prior = torch.full((rows.half, batch, rows.k), -1, dtype=torch.int32, device=device)
    guess = torch.full((rows.half, batch), -1.0, device=device)

    def launch(i: int, stats: Tensor | None = None) -> None:
        indexer_topk_decode(
            rows.logits[i],
            rows.lengths_of(i),
            rows.k,
            out=results[i],
            prior=prior[i % rows.half] if hinted else None,
            guess_state=guess[i % rows.half] if hinted else None,
            prior_offset=rows.offset_of(i) if hinted else 0,
            path=path,
            quantile_guess=quantile,
            ctas_per_row=ctas_per_row,
            pdl=pdl,
            stats=stats,
            phase_clocks=None if clocks is None else clocks[i],
        )

    def statistics(i: int) -> Tensor:
        stats = torch.zeros(batch, len(STATS_COLUMNS), dtype=torch.int32, device=device)
        launch(i, stats)
        return stats

    return Prepared(launch, results, statistics)
