"""The contract of the ops, in one place: lengths and windows of rows, the order of values, the exact oracle.

**Which items.** In decode, row ``r`` yields the ``k`` largest of ``logits[r, 0:n_r]``, with the same multiset
of values as ``torch.topk``. Among values equal to the k-th one, the smallest indices win, so the set is
unique. In prefill the same holds for ``logits[r, start_r:start_r + n_r]``, and indices count from
``start_r``. It holds too where the columns of a row come in slices, one call for each.

**In what order.** Ascending index. A row with ``n_r <= k`` yields ``0 .. n_r - 1`` and then ``-1``;
a row with ``n_r <= 0`` yields only ``-1``.

**Masked scores.** Scores of ``-inf`` are selected where nothing greater is left. With `drop_masked` they are
not selected: the items of a row are the unmasked ones among its ``k`` largest, ascending, and then ``-1``.

**Blocks.** A block is `BLOCK_SIZE` consecutive scores of a row; the last block may be shorter. A block ranks
by its greatest score. The ``block_k`` best blocks are chosen: always the newest block, which holds the last
visible score, and of the other blocks those that rank highest. Among blocks of equal rank the smallest
numbers win. With `drop_masked` no block of ``-inf`` alone is chosen, but for the newest. A row may start at
any column, from which its length, its positions and its blocks count.

**How values compare.** As IEEE 754 compares them: ``-0.0 == +0.0``, denormals count. Every NaN is
equal to every other and above ``+inf``, as in ``torch.topk``.

The kernels implement the same rules on the same key; the tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gvr_topk.constants import BLOCK_SIZE, MAX_WIDTH

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Score dtypes the op takes. The 16-bit ones widen to fp32 exactly, so one key serves all three."""

KEY_NAN = 0xFFFFFFFF
"""Key of every NaN: the largest, because NaN ranks above +inf."""

KEY_MASKED = 0x007FFFFF
"""Key of ``-inf``, the smallest."""


def row_lengths(seq_lens: Tensor, rows: int, next_n: int) -> Tensor:
    """Visible length of every row: ``seq_len - next_n + (row % next_n) + 1``, int64; below 1 for empty rows.

    `seq_lens` are the key counts of requests, ``[rows / next_n]``, the last draft position included.
    """
    row = torch.arange(rows, device=seq_lens.device)
    return seq_lens.to(torch.int64)[row // next_n] - next_n + row % next_n + 1


def row_windows(row_starts: Tensor, row_ends: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Window of every row of a prefill, ``[max(start, 0), min(end, width))``: first column and length, int64.

    An inverted window is empty, with a length of 0.
    """
    starts = row_starts.to(torch.int64).clamp(min=0)
    return starts, (row_ends.to(torch.int64).clamp(max=width) - starts).clamp(min=0)


def order_key(values: Tensor) -> Tensor:
    """Map fp32, bf16 or fp16 values to integers that compare as the contract compares the values.

    They are unsigned keys of 32 bits in an int64: a larger value has a larger key, and equal values (both
    zeros, all NaNs) share one.
    """
    # Integers alone: floating-point arithmetic would take denormals for zeros where the process flushes them
    # (`torch.set_flush_denormal`, or -ffast-math in some library). Widening is exact and moves bits only.
    bits = values.to(torch.float32).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    bits = torch.where(magnitude == 0, 0, bits)  # -0.0 equals +0.0
    key = torch.where(bits >> 31 == 1, 0xFFFFFFFF - bits, bits + 0x80000000)
    return torch.where(magnitude > 0x7F800000, KEY_NAN, key)


def exact_topk(logits: Tensor, lengths: Tensor, k: int, starts: Tensor | None = None) -> Tensor:
    """Exact top-k under the contract, by sorting; this is the oracle and the CPU implementation.

    The visible part of a row begins at `starts`, from which indices count (default 0), has `lengths`
    elements, and ends with the row at the latest; nothing else is looked at. Returns ascending indices and
    then ``-1``, ``[rows, k]``, int32.
    """
    width = logits.shape[1]
    position = torch.arange(width, device=logits.device)
    if starts is None:
        starts = torch.zeros_like(lengths)
    visible = (position >= starts[:, None]) & (position < (starts + lengths)[:, None])
    index = largest(order_key(logits), visible, k)
    return torch.where(index >= 0, index - starts[:, None], -1).to(torch.int32)


def largest(keys: Tensor, visible: Tensor, k: int) -> Tensor:
    """Select the `k` largest visible keys of every row, by sorting: ascending indices, then ``-1``, int64.

    Keys, ``[rows, width]``, are those of `order_key`, in at most 2**21 columns; `visible` says which count.
    """
    rows, width = keys.shape
    # One integer per element orders by value first and by smaller index second. 21 index bits
    # (MAX_WIDTH) and 33 key bits fit an int64; -1 keeps invisible elements below everything.
    position = torch.arange(width, device=keys.device)
    ranked = (keys << 21) | (MAX_WIDTH - 1 - position)
    ranked = torch.where(visible, ranked, -1)
    taken = min(k, width)
    top, index = torch.topk(ranked, taken, dim=1, sorted=False)
    index = torch.sort(torch.where(top >= 0, index, MAX_WIDTH), dim=1).values
    result = torch.full((rows, k), -1, dtype=torch.int64, device=keys.device)
    result[:, :taken] = torch.where(index < MAX_WIDTH, index, -1)
    return result


def started_rows(logits: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Move the column from which each row counts to the front, and end each row with its columns.

    A first column outside of the row counts as 0 or as `width`. Returns the rows, each filled up with its
    last score, and their lengths, int64.
    """
    width = logits.shape[1]
    first = starts.to(torch.int64).clamp(0, width)
    column = first[:, None] + torch.arange(width, device=logits.device)
    return logits.gather(1, column.clamp(max=width - 1)), torch.minimum(lengths, width - first)


def best_blocks(logits: Tensor, lengths: Tensor, block_k: int, *, drop: bool = False) -> Tensor:
    """Best blocks of every row, exactly, by sorting; `logits` and `lengths` as for `exact_topk`.

    `drop` leaves masked blocks out. Returns ascending numbers of blocks and then ``-1``, ``[rows, block_k]``,
    int32.
    """
    rows, width = logits.shape
    blocks = -(-width // BLOCK_SIZE)
    keys = torch.full((rows, blocks * BLOCK_SIZE), -1, dtype=torch.int64, device=logits.device)
    visible = torch.arange(width, device=logits.device) < lengths[:, None]
    keys[:, :width] = torch.where(visible, order_key(logits), -1)
    keys = keys.view(rows, blocks, BLOCK_SIZE).amax(dim=2)
    newest = (lengths.to(torch.int64) - 1) // BLOCK_SIZE
    is_newest = torch.arange(blocks, device=logits.device) == newest[:, None]
    keys = torch.where(is_newest, KEY_NAN + 1, keys)
    return largest(keys, keys > (KEY_MASKED if drop else -1), block_k).to(torch.int32)


def exact_topk_in_blocks(
    logits: Tensor, lengths: Tensor, blocks: Tensor, k: int, *, drop: bool = False
) -> Tensor:
    """Exact top-k within given blocks of every row, by sorting; `logits` and `lengths` as for `exact_topk`.

    `blocks`, ``[rows, n_blocks]``, ascend; numbers of blocks that a row does not have are ignored. `drop`
    leaves masked scores out. Returns positions in the order of the blocks and then ``-1``, ``[rows, k]``,
    int32.
    """
    rows, width = logits.shape
    if width == 0 or blocks.shape[1] == 0:
        return torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    first = blocks.to(torch.int64)[:, :, None] * BLOCK_SIZE
    position = (first + torch.arange(BLOCK_SIZE, device=logits.device)).flatten(1)
    visible = (position >= 0) & (position < lengths[:, None])
    keys = order_key(logits.gather(1, position.clamp(0, width - 1)))
    place = largest(keys, visible & (keys > (KEY_MASKED if drop else -1)), k)
    chosen = position.gather(1, place.clamp(min=0))
    return torch.where(place >= 0, chosen, -1).to(torch.int32)


def drop_masked(logits: Tensor, positions: Tensor) -> Tensor:
    """Remove the positions whose score is ``-inf`` from a selection: indices that ascend, then ``-1``."""
    if logits.shape[1] == 0:
        return positions
    scores = logits.gather(1, positions.to(torch.int64).clamp(min=0))
    kept = torch.where((positions >= 0) & (scores != -torch.inf), positions, MAX_WIDTH)
    kept = torch.sort(kept, dim=1).values
    return torch.where(kept < MAX_WIDTH, kept, -1)
