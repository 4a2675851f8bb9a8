"""The ops on a CPU: the contract, by sorting. They make no guess, and keep the state as CUDA does.

All arguments are checked already.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gvr_topk.arguments import (
    BlocksArguments,
    DecodeArguments,
    InBlocksArguments,
    PrefillArguments,
    PrefillSliceArguments,
    TopkItemsArguments,
)
from gvr_topk.constants import (
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    HintReason,
    Path,
    StatsColumn,
)
from gvr_topk.contract import (
    best_blocks,
    drop_masked,
    exact_topk,
    exact_topk_in_blocks,
    largest,
    order_key,
    row_lengths,
    row_windows,
    started_rows,
)
from gvr_topk.policy import asks_for_hint, can_use_heuristic


def to_slots(positions: Tensor, page_table: Tensor, page_size: int, next_n: int) -> Tensor:
    """As `to_slots_of_requests`, of requests with `next_n` rows each."""
    request = torch.arange(positions.shape[0], device=positions.device) // next_n
    return to_slots_of_requests(positions, page_table, page_size, request)


def to_slots_of_requests(positions: Tensor, page_table: Tensor, page_size: int, request: Tensor) -> Tensor:
    """Return the physical slots of positions, ``[rows, k]``, in a paged cache, as the op documents them.

    `request` is the row of the page table for each row, int64; any number where all positions are ``-1``.
    """
    if page_table.numel() == 0:
        return torch.full_like(positions, -1)
    position = positions.to(torch.int64)
    page = torch.div(position, page_size, rounding_mode="floor")
    known = (position >= 0) & (page < page_table.shape[1])
    table_row = request.clamp(0, page_table.shape[0] - 1)
    base = page_table[table_row[:, None], torch.where(known, page, 0)].to(torch.int64)
    slot = base * page_size + position % page_size
    known &= (base >= 0) & (slot <= torch.iinfo(torch.int32).max)
    return torch.where(known, slot, -1).to(torch.int32)


def _add_offsets(positions: Tensor, offsets: Tensor) -> Tensor:
    """Add each row's offset in 64 bits; ``-1`` stays, and results that int32 cannot hold become ``-1``."""
    limits = torch.iinfo(torch.int32)
    moved = positions.to(torch.int64) + offsets.to(torch.int64)[:, None]
    held = (positions >= 0) & (moved >= limits.min) & (moved <= limits.max)
    return torch.where(held, moved, -1).to(torch.int32)


def _write_results(
    a: DecodeArguments | PrefillArguments | PrefillSliceArguments,
    positions: Tensor,
    counts: Tensor,
    slots: Tensor | None,
) -> None:
    """Write positions, cache slots beside or in place of them, and how many items each row has."""
    assert a.out is not None
    a.out[:, : a.k] = positions
    if slots is not None:
        target = a.out if a.slots is None else a.slots
        target[:, : a.k] = slots
    if a.counts is not None:
        a.counts.copy_(counts)


def _visible_lengths(a: DecodeArguments | BlocksArguments | InBlocksArguments, width: int) -> Tensor:
    """Return the number of scores visible to each row, ``[rows]``, int64, at most `width`."""
    rows = a.logits.shape[0]
    by_row = a.seq_lens.shape[0] == rows
    keys = row_lengths(a.seq_lens, rows, 1 if by_row else a.next_n).clamp(min=0)
    return (keys // a.compress_ratio).clamp(max=width)


def decode(a: DecodeArguments) -> None:
    """Serve one call of the decode op; CPU tensors only."""
    rows, width = a.logits.shape
    if rows == 0:
        return
    if a.page_table is not None and a.flags & FLAG_CLAMP_PAGES:
        width = min(width, a.page_table.shape[1] * a.page_size)
    lengths = _visible_lengths(a, width)
    largest = exact_topk(a.logits, lengths, a.k)
    positions = drop_masked(a.logits, largest) if a.flags & FLAG_DROP_MASKED else largest
    slots = None
    if a.page_table is not None:
        slots = to_slots(positions, a.page_table, a.page_size, a.next_n)
    _write_results(a, positions, (positions >= 0).sum(dim=1), slots)
    if a.stats is not None:
        a.stats.zero_()
        a.stats[:, StatsColumn.HITS] = -1
    if a.state is None and a.stats is None and a.next_state is None:
        return
    before = a
    if a.row_slot is not None and a.state is not None:
        # Rows that share a slot all start from what the slot held before the call.
        kept = None if a.indices is None else a.indices.clone()
        before = a._replace(state=a.state.clone(), indices=kept)
    for row in range(rows):
        _carry_over(a, before, row, int(lengths[row]), largest[row], positions[row])


def _leaves_state(a: DecodeArguments, row: int) -> bool:
    """Say whether the row writes its slot.

    It does so if states go to slots (`next_state` is None), it is the last row of its request, and no later
    request names the slot.
    """
    if row % a.next_n != a.next_n - 1 or a.next_state is not None:
        return False
    return a.row_slot is None or not bool((a.row_slot[row + a.next_n :: a.next_n] == a.row_slot[row]).any())


def _carry_over(
    a: DecodeArguments, before: DecodeArguments, row: int, length: int, largest: Tensor, chosen: Tensor
) -> None:
    """Write the statistics of one row, from the state `before` the call, and the state if the row leaves one.

    `largest` are the positions of the k largest scores, and `chosen` those of them that are not dropped as
    masked.
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


def _state_after(a: DecodeArguments, row: int, length: int, largest: Tensor) -> Tensor:
    """Return the words that a row leaves, which hold what is known of its k-th value."""
    if length <= a.k:
        return _words(STATE_UNKNOWN)
    scores = a.logits[row][largest.to(torch.int64)]
    kth_value = float(scores[order_key(scores).argmin()])
    if math.isnan(kth_value) or kth_value == math.inf:
        return _words(STATE_INFINITE)
    if kth_value == -math.inf:
        return _words(STATE_MASKED)
    return _words(STATE_VALUE_ONLY, kth_value)


def _words(first: float, kth_value: float = 0.0) -> Tensor:
    return torch.tensor([first, kth_value, 0.0, 0.0], device="cpu")


def _reason(a: DecodeArguments, length: int, slot: int, slots: int) -> HintReason:
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


def _requests(a: PrefillArguments | PrefillSliceArguments) -> tuple[Tensor, Tensor]:
    """Return the request of each row, ``[rows]``, int64, and whether there is such a request."""
    if a.row_request is None:
        request = torch.arange(a.logits.shape[0], device="cpu")
        return request, torch.ones_like(request, dtype=torch.bool)
    table = a.offsets if a.page_table is None else a.page_table
    assert table is not None
    request = a.row_request.to(torch.int64)
    return request, (request >= 0) & (request < table.shape[0])


def _write_positions(a: PrefillArguments | PrefillSliceArguments, positions: Tensor, request: Tensor) -> None:
    """Write the positions that rows of prefill select, shifted and translated as the call asks."""
    counts, slots = (positions >= 0).sum(dim=1), None
    if a.page_table is not None:
        slots = to_slots_of_requests(positions, a.page_table, a.page_size, request)
    if a.offsets is not None and len(a.offsets) > 0:
        positions = _add_offsets(positions, a.offsets[request.clamp(0, len(a.offsets) - 1)])
    _write_results(a, positions, counts, slots)


def prefill(a: PrefillArguments) -> None:
    """Serve one call of the prefill op; CPU tensors only."""
    rows, width = a.logits.shape
    if rows == 0:
        return
    request, has_request = _requests(a)
    starts, lengths = row_windows(a.row_starts, a.row_ends, width)
    lengths = torch.where(has_request, lengths, 0)
    _write_positions(a, exact_topk(a.logits, lengths, a.k, starts), request)
    if a.stats is not None:
        # Every row is the first one of a run, because none is predicted from the row before it.
        reasons = torch.where(lengths > a.k, HintReason.FIRST_STEP, HintReason.SHORT_ROW)
        a.stats.zero_()
        a.stats[:, StatsColumn.HITS] = -1
        a.stats[:, StatsColumn.REASON] = reasons if a.path == Path.AUTO else HintReason.DISABLED


_KEY_BITS = 0xFFFFFFFF


def prefill_slice(a: PrefillSliceArguments) -> None:
    """Serve one call of the prefill op on a slice of its rows; CPU tensors only.

    The first word of a row's carry holds the number of its pairs in the lower 32 bits, and in the upper ones
    the key of its k-th score, or 0 if there are fewer pairs. A pair is a key above a position.
    """
    rows, width = a.logits.shape
    if rows == 0:
        return
    request, has_request = _requests(a)
    # All positions of a carry lie in columns before the slice.
    carried = a.carry[:rows, 1 : 1 + min(a.k, a.column)]
    counts = torch.where(has_request, a.carry[:rows, 0] & _KEY_BITS, 0)
    first = a.row_starts.to(torch.int64).clamp(min=0)
    starts, lengths = row_windows(first - a.column, a.row_ends.to(torch.int64) - a.column, width)
    lengths = torch.where(has_request, lengths, 0)[:, None]
    column = torch.arange(width, device="cpu")
    within = column - starts[:, None]
    is_carried = torch.arange(carried.shape[1], device="cpu") < counts[:, None]
    visible = torch.cat((is_carried, (within >= 0) & (within < lengths)), dim=1)
    keys = torch.cat((carried >> 32 & _KEY_BITS, order_key(a.logits)), dim=1)
    positions = torch.cat((carried & _KEY_BITS, a.column + column - first[:, None]), dim=1)
    index = largest(keys, visible, a.k)
    taken = index.clamp(min=0)
    if keys.shape[1] > 0:
        keys, positions = keys.gather(1, taken), torch.where(index >= 0, positions.gather(1, taken), -1)
    else:
        keys, positions = taken, index
    if a.out is not None:
        _write_positions(a, positions.to(torch.int32), request)
        a.carry[:rows, 0] = 0
        return
    counts = (index >= 0).sum(dim=1)
    kth_key = torch.where(counts == a.k, keys.amin(dim=1), 0)
    a.carry[:rows, 0] = counts | kth_key << 32
    a.carry[:rows, 1:] = keys << 32 | (positions & _KEY_BITS)


def _rows_of_blocks(a: BlocksArguments | InBlocksArguments) -> tuple[Tensor, Tensor]:
    """Return the scores of each row from its first column on, and how many are visible."""
    lengths = _visible_lengths(a, a.logits.shape[1])
    return (a.logits, lengths) if a.row_starts is None else started_rows(a.logits, lengths, a.row_starts)


def blocks(a: BlocksArguments) -> None:
    """Serve one call of the op that chooses blocks; CPU tensors only."""
    if a.logits.shape[0] == 0:
        return
    logits, lengths = _rows_of_blocks(a)
    drop = bool(a.flags & FLAG_DROP_MASKED)
    a.blocks[:, : a.block_k] = best_blocks(logits, lengths, a.block_k, drop=drop)
    positions = exact_topk(logits, lengths, a.k)
    a.out[:, : a.k] = drop_masked(logits, positions) if drop else positions


def in_blocks(a: InBlocksArguments) -> None:
    """Serve one call of the op that selects in given blocks; CPU tensors only."""
    if a.logits.shape[0] == 0:
        return
    logits, lengths = _rows_of_blocks(a)
    drop = bool(a.flags & FLAG_DROP_MASKED)
    a.out[:, : a.k] = exact_topk_in_blocks(logits, lengths, a.blocks, a.k, drop=drop)


def topk_items(a: TopkItemsArguments) -> None:
    """Serve one call of the op that selects items; CPU tensors only."""
    if a.indices.numel() == 0:
        return
    scores, k = a.logits.detach(), a.indices.shape[1]
    keys = order_key(scores)
    index = largest(keys if a.largest else _KEY_BITS - keys, torch.ones_like(keys, dtype=torch.bool), k)
    if a.sorted:
        found = keys.gather(1, index)
        index = index.gather(1, found.argsort(dim=1, descending=bool(a.largest), stable=True))
    if a.values is not None:
        a.values.copy_(scores.gather(1, index))
    a.indices.copy_(index if a.candidates is None else a.candidates.gather(1, index))
