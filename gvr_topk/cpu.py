"""The op on a CPU: the contract itself, by sorting. It makes no guess, and keeps the state as CUDA does."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gvr_topk.arguments import FLAG_CLAMP_PAGES, FLAG_DROP_MASKED, Arguments, check
from gvr_topk.constants import (
    STATE_INFINITE,
    STATE_MASKED,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    HintReason,
    Path,
    StatsColumn,
)
from gvr_topk.contract import drop_masked, exact_topk, order_key, row_lengths
from gvr_topk.policy import asks_for_hint, can_use_heuristic


def to_slots(positions: Tensor, page_table: Tensor, page_size: int, next_n: int) -> Tensor:
    """Physical slots of positions in a paged cache; ``-1`` where there is none.

    Parameters
    ----------
    positions : Tensor, ``[rows, k]``, int32
    page_table : Tensor, ``[rows / next_n, pages]``, int32
    page_size : int
        Positions per page.
    next_n : int
        Rows per request.

    Returns
    -------
    Tensor, ``[rows, k]``, int32
        ``page_table[position // page_size] * page_size + position % page_size``, in 64 bits. ``-1`` for
        the position ``-1``, for a page the table does not hold or holds as a negative number, and for a
        slot beyond int32.
    """
    if page_table.shape[1] == 0:
        return torch.full_like(positions, -1)
    position = positions.to(torch.int64)
    page = torch.div(position, page_size, rounding_mode="floor")
    known = (position >= 0) & (page < page_table.shape[1])
    request = torch.arange(positions.shape[0], device=positions.device) // next_n
    base = page_table[request].gather(1, torch.where(known, page, 0)).to(torch.int64)
    slot = base * page_size + position % page_size
    known &= (base >= 0) & (slot <= torch.iinfo(torch.int32).max)
    return torch.where(known, slot, -1).to(torch.int32)


def decode(a: Arguments) -> None:
    """Serve one call; CPU tensors only.

    Raises
    ------
    ValueError
        A wrong argument, see `gvr_topk.arguments.check`.
    """
    check(a)
    rows, width = a.logits.shape
    if rows == 0:
        return
    by_row = a.seq_lens.shape[0] == rows
    keys = row_lengths(a.seq_lens, rows, 1 if by_row else a.next_n).clamp(min=0)
    if a.page_table is not None and a.flags & FLAG_CLAMP_PAGES:
        width = min(width, a.page_table.shape[1] * a.page_size)
    lengths = (keys // a.compress_ratio).clamp(max=width)
    largest = exact_topk(a.logits, lengths, a.k)
    positions = drop_masked(a.logits, largest) if a.flags & FLAG_DROP_MASKED else largest
    a.out[:, : a.k] = positions
    if a.page_table is not None:
        target = a.out if a.slots is None else a.slots
        target[:, : a.k] = to_slots(positions, a.page_table, a.page_size, a.next_n)
    if a.counts is not None:
        a.counts.copy_((positions >= 0).sum(dim=1))
    if a.stats is not None:
        a.stats.zero_()
        a.stats[:, StatsColumn.HITS] = -1
    if a.state is None and a.stats is None and a.next_state is None:
        return
    before = a
    if a.row_slot is not None and a.state is not None:
        # Of rows that share a slot, each starts from what the slot held before the call.
        kept = None if a.indices is None else a.indices.clone()
        before = a._replace(state=a.state.clone(), indices=kept)
    for row in range(rows):
        _carry_over(a, before, row, int(lengths[row]), largest[row], positions[row])


def _leaves_state(a: Arguments, row: int) -> bool:
    """Whether the row is its request's last one, and no later request names its slot."""
    if row % a.next_n != a.next_n - 1 or a.next_state is not None:
        return False
    return a.row_slot is None or not bool((a.row_slot[row + a.next_n :: a.next_n] == a.row_slot[row]).any())


def _carry_over(
    a: Arguments, before: Arguments, row: int, length: int, largest: Tensor, chosen: Tensor
) -> None:
    """Write the statistics of one row by the state `before` the call, and the state where it leaves one.

    `largest` are the positions of the k largest scores, and `chosen` those of them that are not dropped.
    """
    slot = row // a.next_n if a.row_slot is None else int(a.row_slot[row])
    slots = 0 if a.state is None else a.state.shape[0]
    has_slot = 0 <= slot < slots
    if a.stats is not None:
        a.stats[row, StatsColumn.REASON] = _reason(before, length, slot, slots)
    if a.next_state is not None:
        a.next_state[row] = _state_after(a, row, length, largest)
    if not has_slot or a.state is None:
        return
    if length > a.k and a.stats is not None and before.indices is not None:
        keys = order_key(a.logits[row])
        hinted = before.indices[slot].to(torch.int64)
        hinted = hinted[hinted >= 0] + a.hint_offset
        hinted = hinted[(hinted >= 0) & (hinted < length)]
        kth = keys[largest.to(torch.int64)].min()
        a.stats[row, StatsColumn.HITS] = int((keys[hinted] >= kth).sum())
    if not _leaves_state(a, row):
        return
    if length > a.k:
        a.state[slot] = _state_after(a, row, length, largest)
    if a.indices is not None:
        a.indices[slot] = chosen


def _state_after(a: Arguments, row: int, length: int, largest: Tensor) -> Tensor:
    """Words that a row leaves: what is known of its k-th value."""
    if length <= a.k:
        return torch.tensor([STATE_UNKNOWN, 0.0, 0.0, 0.0])
    scores = a.logits[row][largest.to(torch.int64)]
    kth_value = float(scores[order_key(scores).argmin()])
    if math.isnan(kth_value) or kth_value == math.inf:
        return torch.tensor([STATE_INFINITE, 0.0, 0.0, 0.0])
    if kth_value == -math.inf:
        return torch.tensor([STATE_MASKED, 0.0, 0.0, 0.0])
    return torch.tensor([STATE_VALUE_ONLY, kth_value, 0.0, 0.0])


def _reason(a: Arguments, length: int, slot: int, slots: int) -> HintReason:
    known = a.state is not None and 0 <= slot < slots and float(a.state[slot, 0]) != STATE_UNKNOWN
    return can_use_heuristic(
        length=length,
        k=a.k,
        enabled=asks_for_hint(Path(a.path)),
        has_state=a.state is not None,
        slot=slot,
        slots=slots,
        known=known,
    ).code
