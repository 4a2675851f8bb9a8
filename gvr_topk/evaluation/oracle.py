"""The contract by a sort in NumPy: an oracle that shares no code with the op, not even on the CPU.

`drop_masked_positions` and `translate_positions` run on any device: they are what the op's documentation says
of its other results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gvr_topk.constants import BLOCK_SIZE


def sorted_topk(logits: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Exact top-k of rows on the CPU, as `gvr_topk.contract.exact_topk` states and returns it."""
    return _by_row(logits, lengths, k, lambda scores, row: sorted_row(scores, k))


def sorted_row(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int32]:
    """Return the ascending positions of the `k` largest scores of one row; of equal scores the first ones."""
    # lexsort reads its keys from the last: NaN before numbers, larger before smaller, and then by position.
    order = np.lexsort((-scores, ~np.isnan(scores)))[:k]
    return np.sort(order).astype(np.int32)


def sorted_blocks(logits: Tensor, lengths: Tensor, block_k: int, *, drop: bool = False) -> Tensor:
    """Best blocks of rows, as `gvr_topk.contract` states it; like `sorted_topk`, with numbers of blocks.

    `drop` leaves blocks of -inf alone out, but for the newest.
    """

    def choose(scores: npt.NDArray[np.float32], row: int) -> list[int]:
        greatest = [scores[at : at + BLOCK_SIZE].max() for at in range(0, len(scores), BLOCK_SIZE)]
        if not greatest:
            return []
        newest = len(greatest) - 1
        others = sorted_row(np.array(greatest[:newest], dtype=np.float32), block_k - 1)
        kept = [block for block in others if not drop or greatest[block] != -np.inf]
        return [*kept, newest]

    return _by_row(logits, lengths, block_k, choose)


def sorted_in_blocks(logits: Tensor, lengths: Tensor, blocks: Tensor, k: int) -> Tensor:
    """Exact top-k within given blocks of rows, as `gvr_topk.contract` states it; like `sorted_topk`.

    The blocks, ``[rows, n_blocks]``, may be any numbers. Positions stand in their order.
    """

    def choose(scores: npt.NDArray[np.float32], row: int) -> npt.NDArray[np.int64]:
        within = [range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE) for block in blocks[row].tolist()]
        positions = np.array([position for block in within for position in block], dtype=np.int64)
        there = positions[(positions >= 0) & (positions < len(scores))]
        return there[sorted_row(scores[there], k)]

    return _by_row(logits, lengths, k, choose)


def _by_row(
    logits: Tensor, lengths: Tensor, k: int, choose: Callable[[npt.NDArray[np.float32], int], Any]
) -> Tensor:
    """List what `choose` returns for the visible scores and the number of each row, then -1."""
    result = np.full((logits.shape[0], k), -1, dtype=np.int32)
    for row, (scores, length) in enumerate(zip(logits.float().numpy(), lengths.tolist(), strict=True)):
        chosen = choose(scores[: max(length, 0)], row)
        result[row, : len(chosen)] = chosen
    return torch.from_numpy(result)


def drop_masked_positions(logits: Tensor, positions: Tensor) -> Tensor:
    """Positions whose score is not ``-inf``, in their order, then -1; there is a column of scores or more."""
    scores = logits.gather(1, positions.clamp(min=0).to(torch.int64))
    masked = (positions < 0) | torch.isneginf(scores)
    order = masked.to(torch.int8).argsort(dim=1, stable=True)  # those that stay before the others
    return positions.masked_fill(masked, -1).gather(1, order)


def translate_positions(positions: Tensor, page_table: Tensor, page_size: int, table_row: Tensor) -> Tensor:
    """Slots of positions in a paged cache, as the op's documentation says it.

    `table_row` is the row of the page table for each row of positions; any number where all of those are -1.
    There is at least one request. A slot is -1 for no position, for a page that the table does not hold or
    holds as a negative number, and for a slot that int32 cannot hold.
    """
    requests, pages = page_table.shape
    # One column more, of a page that is not there, for all positions without one.
    tables = torch.nn.functional.pad(
        page_table.to(torch.int64),
        (0, 1),  # pragma: no mutate: more such columns are never read
        value=-1,  # pragma: no mutate: any negative number does
    )
    tables = tables[table_row.clamp(0, requests - 1)]
    position = positions.to(torch.int64)
    page = torch.where(position < 0, pages, position // page_size).clamp(max=pages)
    base = tables.gather(1, page)
    slot = base * page_size + position % page_size
    return torch.where((base < 0) | (slot >= 2**31), -1, slot).to(torch.int32)
