"""What is best so far of rows of prefill whose scores come in slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gvr_topk.arguments import Checks
from gvr_topk.constants import MAX_ROWS, MAX_WIDTH
from gvr_topk.state import fill_chosen

NAME = "gvr_topk.PrefillCarry"
"""What the error messages of a carry begin with."""


class PrefillCarry:
    """The best items so far of rows whose scores come in slices, for `gvr_topk.indexer_topk_prefill`.

    A row holds at most `k` pairs of a score and a position, how many these are, and the score of its k-th
    item. Any content is safe: a call writes nothing outside of its rows whatever a carry holds. The result is
    exact if the rows were empty when their first slice came, and only these calls have written to them.

    Parameters
    ----------
    rows : int
        Most rows of one call, 1 to 2**26. A call with fewer rows uses the first ones.
    k : int
        Items per row, 1 to 2**21.
    device : torch.device or str, default "cpu"
        The scores' device. PyTorch's default device (`torch.set_default_device`) does not count.

    Attributes
    ----------
    words : Tensor, ``[rows, k + 1]``, int64, contiguous
        Opaque. A row whose first word is zero is empty.

    Raises
    ------
    ValueError
        `rows` or `k` is no integer or out of range, or `device` is none that torch can use.

    Examples
    --------
    >>> carry = PrefillCarry(1024, 2048)
    >>> carry.rows, carry.k, carry.nbytes
    (1024, 2048, 16785408)
    """

    def __init__(self, rows: int, k: int, device: torch.device | str = "cpu") -> None:
        checks = Checks(NAME)
        rows, k = checks.integer("rows", rows, 1, MAX_ROWS), checks.integer("k", k, 1, MAX_WIDTH)
        device = checks.device("device", device)
        self.words = torch.zeros((rows, k + 1), dtype=torch.int64, device=device)

    def __repr__(self) -> str:
        return f"PrefillCarry({self.rows}, {self.k}, {str(self.words.device)!r})"

    @property
    def rows(self) -> int:
        """Most rows of one call."""
        return self.words.shape[0]

    @property
    def k(self) -> int:
        """Items per row."""
        return self.words.shape[1] - 1

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return self.words.nbytes

    def reset(self, rows: int | Sequence[int] | Tensor | None = None) -> None:
        """Empty rows that were begun and not ended; enqueued on the current stream.

        A call that ends rows leaves them empty, so this is for rows that are given up.

        Parameters
        ----------
        rows : int, sequence of int, or Tensor, ``[m]``, integer, optional
            Rows to empty; default all of them. A tensor is on the carry's device and is not read on the host:
            a negative or too large number in it means no row.

        Raises
        ------
        ValueError
            A row given as a number does not exist, or `rows` is none of these types.
        """
        fill_chosen(Checks(f"{NAME}.reset"), "rows", rows, [(self.words[:, :1], 0)])
