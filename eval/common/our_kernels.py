"""Our op bound to a chain of decode steps, called as integrations call it or with less.

This is the one module of the evaluation that knows how the benchmark's implementations call the op.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.kernel_timing import POISON, Chain, Prepared
from gvr_topk.contract import STATS_COLUMNS
from gvr_topk.gate import plan
from gvr_topk.ops import indexer_topk_decode, new_guess_state

AUTO = "auto"
"""Path that an integration takes: the plan chooses the kernel."""
CLUSTER = "cluster"
"""Path of the kernels that `AUTO` chooses among; a forced cluster size is an argument of it."""
FOUR_PHASE = "gvr"
"""Path of the paper's four-phase kernel."""

PHASE_STAMPS = 8
SPARE_SLOTS = 3
"""Slots beyond the batch, so that rows and slots are never numbered alike."""


@dataclass(frozen=True)
class Variant:
    """How the op is called.

    Attributes
    ----------
    path : str
        As for `gvr_topk.indexer_topk_decode`.
    prior, state, row_slot : bool
        Whether the op gets the step before's choice, what that step left for the guess, and the slots of
        the rows in both. The last needs one of the others.
    pdl : bool
        Whether each call is launched while the one before still runs.
    """

    path: str = AUTO
    prior: bool = False
    state: bool = True
    row_slot: bool = True
    pdl: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Tensors that are passed beside scores and lengths."""
        given = {"row_slot": self.row_slot, "prior": self.prior, "guess_state": self.state, "out": True}
        return tuple(name for name, is_given in given.items() if is_given)


HINTED = "hinted"
NO_HINT = "no_hint"
NO_ROW_SLOT = "no_row_slot"
WITH_PRIOR = "with_prior"
PDL = "pdl"
PAPER = "paper"

VARIANTS = {
    HINTED: Variant(),
    NO_HINT: Variant(state=False, row_slot=False),
    NO_ROW_SLOT: Variant(row_slot=False),
    WITH_PRIOR: Variant(prior=True),
    PDL: Variant(pdl=True),
    PAPER: Variant(path=FOUR_PHASE, prior=True),
}
"""Our implementations in the benchmark: `HINTED` is what the integrations do."""


def why_refused(variant: Variant, rows: int, width: int, k: int, dtype: torch.dtype) -> str:
    """Why a variant cannot serve a shape; empty when it can."""
    try:
        plan(rows=rows, width=width, k=k, dtype=dtype, path=variant.path)
    except ValueError as error:
        return str(error)
    return ""


def prepare_ours(
    chain: Chain,
    variant: Variant = VARIANTS[HINTED],
    *,
    ctas_per_row: int = 0,
    quantile: bool = True,
    clocks: Tensor | None = None,
) -> Prepared:
    """Bind a variant of the op to a chain.

    Parameters
    ----------
    chain : Chain
        Every row keeps its slot for all steps.
    variant : Variant
        How to call the op.
    ctas_per_row : int
        0 follows the plan.
    quantile : bool
        First threshold of the four-phase kernel from the quantile, as is the op's default.
    clocks : Tensor, ``[count, batch, PHASE_STAMPS]``, int64, optional
        Where a library built with ``GVR_PHASE_TIMING`` writes its stamps.
    """
    device = chain.logits.device
    results = torch.full((chain.count, chain.batch, chain.k), POISON, dtype=torch.int32, device=device)
    slots = chain.batch + SPARE_SLOTS if variant.row_slot else chain.batch
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(chain.batch))
    row_slot = order[: chain.batch].to(device, torch.int32) if variant.row_slot else None
    prior = torch.full((slots, chain.k), -1, dtype=torch.int32, device=device) if variant.prior else None
    state = new_guess_state(slots, device) if variant.state else None

    def launch(step: int, stats: Tensor | None = None) -> None:
        indexer_topk_decode(
            chain.logits[step],
            chain.lengths_of(step),
            chain.k,
            out=results[step],
            prior=prior,
            row_slot=row_slot,
            guess_state=state,
            prior_offset=chain.shift if variant.prior else 0,
            path=variant.path,
            quantile_guess=quantile,
            ctas_per_row=ctas_per_row,
            pdl=variant.pdl,
            stats=stats,
            phase_clocks=None if clocks is None else clocks[step],
        )

    def statistics(step: int) -> Tensor:
        stats = torch.zeros(chain.batch, len(STATS_COLUMNS), dtype=torch.int32, device=device)
        launch(step, stats)
        return stats

    def carried() -> Tensor:
        assert prior is not None
        return prior if row_slot is None else prior[row_slot.to(torch.int64)]

    carries = tuple(tensor for tensor in (prior, state) if tensor is not None)
    return Prepared(launch, results, carries, carried if variant.prior else None, statistics)
