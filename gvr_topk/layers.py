"""The op as a layer: what a model calls in place of ``torch.topk`` over its indexer's scores.

`IndexerTopk` is a pure layer as Hugging Face's `kernels` library wants it, without constructor or state, so
that its ``forward`` can take the place of another layer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gvr_topk.ops import indexer_topk_decode


def indexer_topk(scores: Tensor, lengths: Tensor | None, k: int) -> Tensor:
    """Select the `k` largest scores of every row, for scores of any number of dimensions.

    Parameters
    ----------
    scores : Tensor, ``[..., width]``, float32, bfloat16 or float16
        Indexer scores, such as ``[batch, queries, keys]``; what is masked may be ``-inf``.
    lengths : Tensor, ``[...]``, integer, or None
        Visible elements of each row; None: all.
    k : int
        Items per row.

    Returns
    -------
    Tensor, ``[..., k]``, int32
        Ascending positions, -1 where a row has fewer than `k` visible elements. Without `lengths` and with
        `k` of at most `width` there is no -1, and the scores at these positions are those that
        ``torch.topk`` returns, ``-inf`` included; of equal ones the smallest positions are chosen.

    Notes
    -----
    It has no backward pass: positions have no gradient. Gather scores with them where one is wanted.

    Examples
    --------
    >>> scores = torch.tensor([[[0.5, 3.0, 1.0, 3.0]]])
    >>> indexer_topk(scores, None, 2)
    tensor([[[1, 3]]], dtype=torch.int32)
    """
    rows = scores.detach().reshape(-1, scores.shape[-1])
    if lengths is None:
        lengths = torch.full(scores.shape[:-1], scores.shape[-1], dtype=torch.int32, device=scores.device)
    chosen = indexer_topk_decode(rows, lengths.reshape(-1).to(torch.int32), k)
    return chosen.reshape(*scores.shape[:-1], k)


class IndexerTopk(torch.nn.Module):
    """Layer of `indexer_topk`."""

    has_backward = False
    can_torch_compile = True

    def forward(self, scores: Tensor, lengths: Tensor | None, k: int) -> Tensor:
        """Positions of the `k` largest scores of every row; see `indexer_topk`."""
        return indexer_topk(scores, lengths, k)
