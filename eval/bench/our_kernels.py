"""Our op bound to a chain of decode steps, called as integrations call it or with less.

This is the one module of the evaluation that knows how the benchmark's implementations call the op.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.bench.kernel_timing import Chain, Implementation, Prepared
from eval.bench.oracles import BLOCK_K, given_blocks
from gvr_topk.arguments import (
    BlocksArguments,
    DecodeArguments,
    InBlocksArguments,
    PrefillArguments,
    PrefillSliceArguments,
)
from gvr_topk.constants import FLAG_PDL, FLAG_QUANTILE_GUESS
from gvr_topk.ops import launch as launch_op
from gvr_topk.policy import parse_path, plan
from gvr_topk.state import TopkState

SPARE_SLOTS = 3
"""Slots beyond the batch, so that rows and slots are never numbered alike."""


@dataclass(frozen=True)
class Variant:
    """How the op is called."""

    path: str = "auto"  # as for `gvr_topk.indexer_topk_decode`
    state: bool = True  # whether the op gets what the step before left
    indices: bool = False  # whether the state keeps the positions chosen last, which every step then writes
    row_slot: bool = True  # whether the op gets the rows' slots in the state
    pdl: bool = False  # whether each call is launched while the one before still runs

    @property
    def arguments(self) -> tuple[str, ...]:
        """What is passed beside scores and lengths, as one would write it in a call."""
        given = {
            f'path="{self.path}"': self.path != "auto",
            "row_slot": self.row_slot,
            "state": self.state,
            "out": True,
            "pdl=True": self.pdl,
        }
        return tuple(name for name, is_given in given.items() if is_given)


HINTED = "hinted"
NO_HINT = "no_hint"
RADIX_ROUNDS = "radix_rounds"
PDL = "pdl"
PAPER = "paper"

PREFILL = "prefill"
PREFILL_ROUNDS = "prefill_radix_rounds"
PREFILL_SLICES = "prefill_slices"
LAST_SLICE = "prefill_last_slice"
BLOCKS = "blocks"
IN_BLOCKS = "in_blocks"

VARIANTS = {
    HINTED: Variant(),
    NO_HINT: Variant(path="no_hint", state=False, row_slot=False),
    RADIX_ROUNDS: Variant(path="radix_rounds", state=False, row_slot=False),
    PDL: Variant(pdl=True),
    PAPER: Variant(path="paper_gvr", indices=True),
}
"""Ways to call the decode op: `HINTED` is what the integrations do."""


def _why_refused(variant: Variant, rows: int, width: int, k: int, dtype: torch.dtype) -> str:
    """Why a variant cannot serve a shape; empty when it can."""
    try:
        plan(rows=rows, width=width, k=k, dtype=dtype, path=variant.path)
    except ValueError as error:
        return str(error)
    return ""


def prepare_ours(chain: Chain, variant: Variant = VARIANTS[HINTED]) -> Prepared:
    """Bind a variant of the op to a chain, of which every row keeps its slot for all steps."""
    device, results = chain.logits.device, chain.outputs()
    slots = chain.batch + SPARE_SLOTS if variant.row_slot else chain.batch
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(chain.batch))
    row_slot = order[: chain.batch].to(device, torch.int32) if variant.row_slot else None
    state = TopkState(slots, chain.k, device, keep_indices=variant.indices) if variant.state else None
    words, indices = (None, None) if state is None else (state.words, state.indices)
    flags = FLAG_QUANTILE_GUESS + FLAG_PDL * variant.pdl

    def launch(step: int, stats: Tensor | None = None) -> None:
        launch_op(
            DecodeArguments(
                logits=chain.logits[step],
                seq_lens=chain.lengths_of(step),
                out=results[step],
                row_slot=row_slot,
                state=words,
                indices=indices,
                stats=stats,
                k=chain.k,
                path=parse_path(variant.path),
                flags=flags,
                hint_offset=chain.shift if variant.indices else 0,
            )
        )

    def carried() -> Tensor:
        assert indices is not None
        return indices if row_slot is None else indices[row_slot.to(torch.int64)]

    carries = tuple(tensor for tensor in (words, indices) if tensor is not None)
    return Prepared(launch, results, carries, None if indices is None else carried, statistics=launch)


def prepare_prefill(chain: Chain, path: str) -> Prepared:
    """Bind the op for prefill chunks, by its `path`, to a chain whose windows begin at column 0."""
    results = chain.outputs()
    starts = torch.zeros(chain.batch, dtype=torch.int32, device=chain.logits.device)

    def launch(step: int, stats: Tensor | None = None) -> None:
        given = (chain.logits[step], starts, chain.lengths_of(step), results[step], chain.k)
        launch_op(PrefillArguments(*given, stats=stats, path=int(parse_path(path))))

    return Prepared(launch, results, statistics=launch)


SLICES = 8
"""Number of slices of equal width that the columns of a chunk come in."""


def prepare_slices(chain: Chain, last_alone: bool = False) -> Prepared:
    """Bind the op for prefill in slices to a chain: all of them, or the last behind what the others left."""
    results, width = chain.outputs(), chain.logits.shape[2]
    starts = torch.zeros(chain.batch, dtype=torch.int32, device=chain.logits.device)
    words = torch.zeros(chain.count, chain.batch, chain.k + 1, dtype=torch.int64, device=starts.device)
    bounds = [width * number // SLICES for number in range(SLICES + 1)]
    slices = list(itertools.pairwise(bounds))

    def take(step: int, begin: int, end: int) -> None:
        out = results[step] if end == width else None
        given = (chain.logits[step][:, begin:end], starts, chain.lengths_of(step), words[step], chain.k)
        launch_op(PrefillSliceArguments(*given, column=begin, out=out))

    def launch(step: int) -> None:
        for bounds_of_slice in slices[-1:] if last_alone else slices:
            take(step, *bounds_of_slice)

    if last_alone:
        for step, bounds_of_slice in itertools.product(range(chain.count), slices[:-1]):
            take(step, *bounds_of_slice)
    return Prepared(launch, results, (words,))


def prepare_blocks(chain: Chain) -> Prepared:
    """Bind the op that chooses blocks to a chain: positions of a row, and behind them its blocks."""
    results, k = chain.outputs(chain.k + BLOCK_K), chain.k

    def launch(step: int) -> None:
        out, blocks = results[step][:, :k], results[step][:, k:]
        launch_op(BlocksArguments(chain.logits[step], chain.lengths_of(step), out, blocks, k, BLOCK_K))

    return Prepared(launch, results)


def prepare_in_blocks(chain: Chain) -> Prepared:
    """Bind the op that selects in given blocks to a chain."""
    results, blocks = chain.outputs(), given_blocks(chain)

    def launch(step: int) -> None:
        given = (chain.logits[step], chain.lengths_of(step), blocks[step], results[step], chain.k)
        launch_op(InBlocksArguments(*given))

    return Prepared(launch, results)


IMPLEMENTATIONS = {
    its.name: its
    for its in (
        *(
            Implementation(
                name,
                functools.partial(prepare_ours, variant=variant),
                functools.partial(_why_refused, variant),
            )
            for name, variant in VARIANTS.items()
        ),
        Implementation(PREFILL, functools.partial(prepare_prefill, path="auto")),
        Implementation(PREFILL_ROUNDS, functools.partial(prepare_prefill, path="radix_rounds")),
        Implementation(PREFILL_SLICES, prepare_slices),
        Implementation(LAST_SLICE, functools.partial(prepare_slices, last_alone=True)),
        Implementation(BLOCKS, prepare_blocks),
        Implementation(IN_BLOCKS, prepare_in_blocks),
    )
}
"""Ours in the benchmark: decode, prefill, and the source and a consumer of a two-level indexer."""
