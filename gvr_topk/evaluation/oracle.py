"""The contract by a sort in NumPy: an oracle that shares no code with the op, on the CPU neither."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def sorted_topk(logits: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Exact top-k of rows, as `gvr_topk.contract` states it.

    Parameters
    ----------
    logits : Tensor, shape [rows, width], floating point
        Scores, on the CPU.
    lengths : Tensor, shape [rows], integer
        Visible elements of each row; below one none are.
    k : int
        Items per row.

    Returns
    -------
    Tensor, shape [rows, k], int32
        Ascending positions, then -1.
    """
    result = np.full((logits.shape[0], k), -1, dtype=np.int32)
    for row, (scores, length) in enumerate(zip(logits.float().numpy(), lengths.tolist(), strict=True)):
        chosen = sorted_row(scores[: max(length, 0)], k)
        result[row, : len(chosen)] = chosen
    return torch.from_numpy(result)


def sorted_row(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int32]:
    """Ascending positions of the `k` largest scores of one row, of equal ones those that come first."""
    # lexsort reads its keys from the last: NaN before numbers, larger before smaller, and then by position.
    order = np.lexsort((-scores, ~np.isnan(scores)))[:k]
    return np.sort(order).astype(np.int32)
