"""Score rows of a decode trace, made on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.floating[Any]]


def trace_scores(keys: Array, queries: Array, weights: Array, device: torch.device | str) -> list[Tensor]:
    """Score every step of a trace.

    Parameters
    ----------
    keys : ndarray, shape [keys, head_dim]
        Indexer key of each position. The last step sees all of them, each step before one less.
    queries : ndarray, shape [steps, heads, head_dim]
        Indexer query heads of each step.
    weights : ndarray, shape [steps, heads]
        Weight of each head at each step.
    device : torch.device or str
        Where the rows are made.

    Returns
    -------
    list of Tensor, ``[1, length]``, float32
    """
    steps, _, head_dim = queries.shape
    k, q, w = (torch.from_numpy(array).to(device, torch.float32) for array in (keys, queries, weights))
    w = w * head_dim**-0.5
    first = len(keys) - steps + 1
    return [(w[step] @ (q[step] @ k[: first + step].T).relu())[None] for step in range(steps)]
