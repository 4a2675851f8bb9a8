"""Random calls of the ops of blocks: lengths, contents, given blocks and layouts.

As in `eval.fuzz.fuzz_cases`, a case is a few plain values drawn from ``(seed, index)``, and its tensors are
drawn from the same pair.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.fuzz.fuzz_cases import DTYPES, on_cpu, strided
from eval.fuzz.fuzz_contents import CONTENTS, Choices, Draw
from gvr_topk.constants import BLOCK_SIZE, MAX_BLOCKS_WIDTH, MAX_CHOSEN_BLOCKS
from gvr_topk.contract import best_blocks, exact_topk, exact_topk_in_blocks, row_lengths
from gvr_topk.evaluation.oracle import sorted_blocks, sorted_in_blocks, sorted_topk

LENGTHS = ("full", "random", "near_k", "near_blocks", "tiny", "beyond", "any_int32")
GIVEN = ("chosen", "ascending", "unordered", "repeated", "any_int32", "none")
POISONS = ("none", "nan", "inf")

INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True)
class BlocksCase:
    """One call of each op of blocks, before its tensors.

    Attributes
    ----------
    seed, index : int
        What the case was drawn from.
    requests, next_n, width : int
        Shape: ``requests * next_n`` rows.
    k, block_k : int
        Positions and blocks that are selected of a row.
    given_k : int
        Positions that are selected in given blocks.
    dtype : str
        A key of `eval.fuzz.fuzz_cases.DTYPES`.
    contents : tuple of str
        Kinds of row (`CONTENTS`), taken in turn.
    lengths : tuple of str
        Kinds of visible length (`LENGTHS`), taken in turn.
    given : tuple of str
        Kinds of given blocks (`GIVEN`), taken in turn.
    given_blocks : int
        How many blocks are given for each row.
    by_row : bool
        A length for each row, instead of one for each request.
    compress_ratio : int
    poison : str
        What lies behind the rows' ends: ``none`` (other scores), ``nan`` or ``inf``.
    pad, shift, blocks_pad : int
        Elements between rows, by which the first row misses its alignment, and between rows of blocks.
    pdl : bool
        Passed on.
    """

    seed: int
    index: int
    requests: int
    next_n: int
    width: int
    k: int
    block_k: int
    given_k: int
    dtype: str
    contents: tuple[str, ...]
    lengths: tuple[str, ...]
    given: tuple[str, ...]
    given_blocks: int
    by_row: bool
    compress_ratio: int
    poison: str
    pad: int
    shift: int
    blocks_pad: int
    pdl: bool

    def as_json(self) -> dict[str, Any]:
        return {"op": "blocks", **asdict(self)}

    def optional(self) -> dict[str, bool]:
        """Optional arguments of the ops, and whether the calls have them."""
        return {
            "next_n": self.next_n > 1,
            "seq_lens by row": self.by_row,
            "compress_ratio": self.compress_ratio > 1,
            "pdl": self.pdl,
        }

    @property
    def rows(self) -> int:
        return self.requests * self.next_n


def draw_blocks_case(seed: int, index: int, *, elements: int) -> BlocksCase:
    """Draw a case of at most about `elements` scores; same arguments, same case."""
    choices = Choices(seed, index)
    rng, pick, some = choices.rng, choices.pick, choices.some
    next_n = int(pick(1, 1, 1, 2, 3))
    longest = min(elements // next_n, MAX_BLOCKS_WIDTH)
    block_k = 2048 if rng.random() < 0.4 else max(2, int(2 ** rng.uniform(1, 11)))
    k = min(512, block_k - 1) if rng.random() < 0.5 else int(rng.integers(1, block_k))
    # Rows of no more than block_k blocks have all of them chosen: most cases are longer.
    shortest = min(BLOCK_SIZE * block_k, longest) if rng.random() < 0.8 else 1
    width = max(1, int(2 ** rng.uniform(np.log2(shortest), np.log2(longest))))
    if rng.random() < 0.3:
        width = max(1, min(longest, (1 << int(np.log2(width))) + int(rng.integers(-9, 10))))
    most = max(1, min(elements // (width * next_n), 160))
    requests = int(2 ** rng.uniform(0, np.log2(most))) if most > 1 else 1
    given_blocks = int(pick(0, 1, 2048, block_k, int(rng.integers(1, MAX_CHOSEN_BLOCKS + 1))))
    return BlocksCase(
        seed=seed,
        index=index,
        requests=requests,
        next_n=next_n,
        width=width,
        k=k,
        block_k=block_k,
        given_k=int(pick(1, 512, int(2 ** rng.uniform(0, 14.2)))),
        dtype=str(pick(*DTYPES)),
        contents=some(tuple(CONTENTS), 3),
        lengths=some(LENGTHS, 3) if rng.random() < 0.6 else ("full",),
        given=some(GIVEN, 3),
        given_blocks=given_blocks,
        by_row=bool(next_n > 1 and rng.random() < 0.5),
        compress_ratio=int(pick(1, 1, 4, 128)),
        poison=str(pick(*POISONS)),
        pad=int(pick(0, 1, 3, 8, 64)),
        shift=int(pick(0, 0, 1, 2, 3, 5)),
        blocks_pad=int(pick(0, 0, 1, 3)),
        pdl=bool(rng.random() < 0.3),
    )


@dataclass
class BlocksProblem:
    """Tensors of a case, and what the ops have to write."""

    logits: Tensor  # [rows, width], with NaN between the rows
    seq_lens: Tensor  # [requests] or [rows] int32
    given: Tensor  # [rows, given_blocks] int32
    positions: Tensor  # [rows, k] int32: wanted
    blocks: Tensor  # [rows, block_k] int32: wanted
    in_given: Tensor  # [rows, given_k] int32: wanted


def make_blocks_problem(case: BlocksCase, device: str, *, by_sort: bool) -> BlocksProblem:
    """Tensors of a case on a device, and the answers of the contract, or `by_sort` those of NumPy."""
    draw = torch.Generator(device=device).manual_seed(case.seed * 1_000_003 + case.index)
    logits = strided(case.rows, case.width, case.pad, case.shift, DTYPES[case.dtype], device)
    for turn, kind in enumerate(case.contents):
        rows = slice(turn, None, len(case.contents))
        count = len(range(case.rows)[rows])
        if count:
            logits[rows] = CONTENTS[kind](count, case.width, case.k, draw, logits.dtype).to(logits.dtype)
    seq_lens = _seq_lens(case, draw)
    keys = row_lengths(seq_lens, case.rows, 1 if len(seq_lens) == case.rows else case.next_n)
    lengths = (keys.clamp(min=0) // case.compress_ratio).clamp(max=case.width)
    if case.poison != "none":
        behind = torch.arange(case.width, device=device) >= lengths[:, None]
        logits.masked_fill_(behind, float(case.poison))
    rank_blocks, rank, rank_in_blocks = (
        (on_cpu(sorted_blocks), on_cpu(sorted_topk), on_cpu(sorted_in_blocks))
        if by_sort
        else (best_blocks, exact_topk, exact_topk_in_blocks)
    )
    blocks = rank_blocks(logits, lengths, case.block_k)
    given = torch.full((case.rows, case.given_blocks + case.blocks_pad), 0, dtype=torch.int32, device=device)
    given = given[:, : case.given_blocks]
    for turn, kind in enumerate(case.given):
        rows = slice(turn, None, len(case.given))
        if case.given_blocks and len(range(case.rows)[rows]):
            given[rows] = _given(kind, blocks[rows], case, draw)
    return BlocksProblem(
        logits,
        seq_lens,
        given,
        rank(logits, lengths, case.k),
        blocks,
        rank_in_blocks(logits, lengths, given, case.given_k),
    )


def _seq_lens(case: BlocksCase, draw: Draw) -> Tensor:
    """Key counts of requests or rows, kind by kind."""
    count = case.rows if case.by_row else case.requests
    lengths = torch.empty(count, dtype=torch.int64, device=draw.device)
    for turn, kind in enumerate(case.lengths):
        some = lengths[turn :: len(case.lengths)]

        def integers(low: int, high: int, like: Tensor = some) -> Tensor:
            """Integers of ``[low, high)``, one a length."""
            return torch.randint(low, max(high, low + 1), like.shape, generator=draw, device=draw.device)

        if kind == "any_int32":
            some.copy_(integers(INT32.min, INT32.max + 1))
            continue
        bounds = {
            "full": (case.width, case.width + 1),
            "random": (0, case.width + 1),
            "near_k": (case.k - 2, case.k + 3),
            "near_blocks": (BLOCK_SIZE * case.block_k - 9, BLOCK_SIZE * case.block_k + 10),
            "tiny": (-3, 10),
            "beyond": (case.width, 2 * case.width + 9),
        }
        scores = integers(*bounds[kind])
        some.copy_(scores * case.compress_ratio + integers(0, case.compress_ratio))
    return lengths.clamp(INT32.min, INT32.max).to(torch.int32)


def _given(kind: str, chosen: Tensor, case: BlocksCase, draw: Draw) -> Tensor:
    """Blocks that are given for some rows, whose best blocks are these."""
    shape = (len(chosen), case.given_blocks)
    last = -(-case.width // BLOCK_SIZE)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw, device=draw.device)

    if kind == "chosen":
        width = min(case.given_blocks, case.block_k)
        blocks = torch.full(shape, -1, dtype=torch.int64, device=draw.device)
        blocks[:, :width] = chosen[:, :width]
        return blocks
    if kind == "none":
        return torch.full(shape, -1, device=draw.device)
    if kind == "any_int32":
        return integers(INT32.min, INT32.max + 1)
    if kind == "repeated":
        return integers(0, min(last, 5)).sort(dim=1).values
    if kind == "unordered":
        return integers(-3, last + 3)
    # Distinct and ascending, -1 behind them.
    blocks = integers(0, last).sort(dim=1).values
    again = torch.zeros(shape, dtype=torch.bool, device=draw.device)
    again[:, 1:] = blocks[:, 1:] == blocks[:, :-1]
    blocks = blocks.masked_fill(again, last).sort(dim=1).values
    return torch.where(blocks < last, blocks, -1)
