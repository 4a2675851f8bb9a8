"""The contract of the op, once: row lengths, the order of values, and the exact oracle.

**Which items.** Row ``r`` yields the ``k`` largest of ``logits[r, 0:n_r]``, the value multiset of
``torch.topk``. Among values equal to the k-th one, the smallest indices win, so the set is unique.

**In what order.** Ascending index. A row with ``n_r <= k`` yields ``0 .. n_r - 1`` and then ``-1``;
a row with ``n_r <= 0`` yields only ``-1``.

**How values compare.** As IEEE 754 compares them: ``-0.0 == +0.0``, denormals count. Every NaN is
equal to every other and above ``+inf``, as in ``torch.topk``.

The kernels implement the same rules on the same key; the tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Score dtypes the op takes. The 16-bit ones widen to fp32 exactly, so one key serves all three."""

MAX_WIDTH = 1 << 21
"""Longest row, in elements, that the kernels are built and tested for."""

MAX_ROWS = 1 << 26
"""Most rows of one call: their blocks fit one launch."""

MAX_PAGE_SIZE = (1 << 31) - 1
"""Largest page of a page table, in positions: positions inside a page are 32-bit numbers."""

CLUSTER_SIZES = (1, 2, 4, 8, 16)
"""CTAs that can share one row."""

KEY_NAN = 0xFFFFFFFF
"""Key of every NaN: the largest, because NaN ranks above +inf."""

PATHS: dict[int, str] = {0: "short", 1: "gvr", 2: "radix", 3: "cluster", 4: "cpu"}
"""Meaning of the ``path`` column of the statistics tensor."""

GUESSES: dict[int, str] = {0: "none", 1: "hint", 2: "row sample", 3: "place", 4: "value"}
"""Meaning of the ``guess`` column of the statistics tensor."""

STATE_FLOATS = 4
"""Numbers of a slot of ``guess_state``."""

PLACES = (48.0, 80.0)
"""Least and greatest first number of a slot of ``guess_state`` that says where a k-th value stood; in the
middle, at the mean of a sample of the row (cpp/kernels/cluster/predictor.cuh). Shares of the hint lie from 0
to 1; negative numbers other than -1 are what short rows leave (cpp/kernels/single/window.cuh)."""

VALUE_ONLY, INFINITE, MASKED = 96.0, 112.0, 128.0
"""First numbers of a slot whose k-th value stood at no place, was infinite or NaN, or minus infinity."""

STATS_COLUMNS = ("path", "passes", "candidates", "snap", "hits", "guess", "guess_hit", "done")
"""Columns of the optional int32 statistics tensor ``[rows, 8]``.

``passes`` counts threshold verifications of the row, ``candidates`` the elements that reached
refinement, ``snap`` the refinement iterations, ``hits`` the hinted positions, duplicates counted, whose
value is at or above the k-th (-1 without a hint), ``guess`` where the first threshold came from,
``guess_hit`` whether it was good at once, ``done`` how the search ended (`DONE` of the reference for
path ``gvr``, the radix rounds of paths ``cluster`` and ``radix``).
"""


def row_length(seq_len: int, row: int, next_n: int) -> int:
    """Visible length of one row: ``seq_len - next_n + (row % next_n) + 1``; may be zero or less."""
    return seq_len - next_n + (row % next_n) + 1


def row_lengths(seq_lens: Tensor, rows: int, next_n: int) -> Tensor:
    """Visible length of every row.

    Parameters
    ----------
    seq_lens : Tensor, ``[rows / next_n]``, int32 or int64
        Key count of each request, the last draft position included.
    rows : int
        Number of score rows.
    next_n : int
        Rows per request (1 plus the number of draft tokens).

    Returns
    -------
    Tensor, ``[rows]``, int64
        Lengths on the device of `seq_lens`; zero or negative for empty rows.
    """
    row = torch.arange(rows, device=seq_lens.device)
    return seq_lens.to(torch.int64)[row // next_n] - next_n + row % next_n + 1


def order_key(values: Tensor) -> Tensor:
    """Map floating-point values to integers that compare as the contract compares the values.

    Parameters
    ----------
    values : Tensor
        fp32, bf16 or fp16, any shape.

    Returns
    -------
    Tensor
        int64 of the same shape, holding an unsigned 32-bit key: larger value, larger key; equal
        values (both zeros, all NaNs) share one key.
    """
    # Integers alone: floating-point arithmetic would take denormals for zeros where the process flushes them
    # (`torch.set_flush_denormal`, or -ffast-math in some library). Widening is exact and moves bits only.
    bits = values.to(torch.float32).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    bits = torch.where(magnitude == 0, 0, bits)  # -0.0 equals +0.0
    key = torch.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return torch.where(magnitude > 0x7F800000, KEY_NAN, key)


def exact_topk(logits: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Exact top-k under the contract, by sorting; the oracle, and the CPU implementation.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``
        Scores. Elements at and past a row's length are not looked at.
    lengths : Tensor, ``[rows]``, integer
        Visible length of each row; at most `width`.
    k : int
        Items per row.

    Returns
    -------
    Tensor, ``[rows, k]``, int32
        Ascending indices, then ``-1``.
    """
    rows, width = logits.shape
    position = torch.arange(width, device=logits.device)
    visible = position[None, :] < lengths[:, None]
    # One integer per element orders by value first and by smaller index second. 21 index bits
    # (MAX_WIDTH) and 32 key bits fit an int64; -1 keeps invisible elements below everything.
    ranked = (order_key(logits) << 21) | (MAX_WIDTH - 1 - position)
    ranked = torch.where(visible, ranked, -1)
    taken = min(k, width)
    top, index = torch.topk(ranked, taken, dim=1, sorted=False)
    index = torch.where(top >= 0, index, MAX_WIDTH)
    index = torch.sort(index, dim=1).values
    result = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    result[:, :taken] = torch.where(index < MAX_WIDTH, index, -1).to(torch.int32)
    return result
