"""The ops as layers, which a model calls in place of ``torch.topk`` over its indexer's scores.

`IndexerTopk` and `IndexerTopkPrefill` are pure layers as Hugging Face's `kernels` library requires them:
without constructor or state, so that their ``forward`` can take the place of another layer's ``forward``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gvr_topk.arguments import Checks
from gvr_topk.ops import indexer_topk_decode, indexer_topk_prefill

_DECODE, _PREFILL = Checks("IndexerTopk"), Checks("IndexerTopkPrefill")


def _check_scores(checks: Checks, scores: Tensor) -> None:
    if not isinstance(scores, Tensor):
        raise checks.wrong_type("scores", Tensor, scores)
    if scores.dim() < 1:
        raise checks.fail("scores", "one dimension or more", list(scores.shape))


def indexer_topk(scores: Tensor, lengths: Tensor | None, k: int) -> Tensor:
    """Select the `k` largest scores of every row, for scores of any number of dimensions.

    Parameters
    ----------
    scores : Tensor, ``[..., width]``, float32, bfloat16 or float16
        Indexer scores, such as ``[batch, queries, keys]``; masked scores may be ``-inf``.
    lengths : Tensor, ``[...]``, integer, or None
        Visible elements of each row; None: all.
    k : int
        Items per row.

    Returns
    -------
    Tensor, ``[..., k]``, int32
        Ascending positions, -1 where a row has fewer than `k` visible elements. Without `lengths` and with
        `k` of at most `width` there is no -1, and the scores at these positions are those that
        ``torch.topk`` returns, ``-inf`` included; among equal scores the smallest positions are chosen.

    Raises
    ------
    ValueError
        An argument is no tensor, or its dtype, shape or device is wrong; the message names it.

    Notes
    -----
    There is no backward pass, because positions have no gradient. Where a gradient is wanted, gather the
    scores at these positions.

    Examples
    --------
    >>> scores = torch.tensor([[[0.5, 3.0, 1.0, 3.0]]])
    >>> indexer_topk(scores, None, 2)
    tensor([[[1, 3]]], dtype=torch.int32)
    """
    _check_scores(_DECODE, scores)
    rows = scores.detach().reshape(-1, scores.shape[-1])
    if lengths is not None:
        _DECODE.integers("lengths", lengths, scores, tuple(scores.shape[:-1]))
    else:
        lengths = torch.full(scores.shape[:-1], scores.shape[-1], dtype=torch.int32, device=scores.device)
    chosen = indexer_topk_decode(rows, lengths.reshape(-1).to(torch.int32), k)
    return chosen.reshape(*scores.shape[:-1], k)


class IndexerTopk(torch.nn.Module):
    """Layer that calls `indexer_topk`."""

    has_backward = False
    can_torch_compile = True

    def forward(self, scores: Tensor, lengths: Tensor | None, k: int) -> Tensor:
        """Positions of the `k` largest scores of every row; see `indexer_topk`."""
        return indexer_topk(scores, lengths, k)


class IndexerTopkPrefill(torch.nn.Module):
    """Layer that calls `gvr_topk.indexer_topk_prefill`: every row selects in a window of its own."""

    has_backward = False
    can_torch_compile = True

    def forward(self, scores: Tensor, row_starts: Tensor, row_ends: Tensor, k: int) -> Tensor:
        """Select the `k` largest scores of the window of every row.

        Parameters
        ----------
        scores : Tensor, ``[rows, width]``, float32, bfloat16 or float16
            Indexer scores, a row for each query token.
        row_starts, row_ends : Tensor, ``[rows]``, integer
            First column of each window, and one past its last column.
        k : int
            Items per row.

        Returns
        -------
        Tensor, ``[rows, k]``, int32
            Ascending positions, counted from the start of the window; -1 where a window has fewer than `k`
            columns.

        Raises
        ------
        ValueError
            An argument is no tensor, or its dtype, shape or device is wrong; the message names it.
        """
        _check_scores(_PREFILL, scores)
        _PREFILL.integers("row_starts", row_starts, scores, (scores.shape[0],))
        _PREFILL.integers("row_ends", row_ends, scores, (scores.shape[0],))
        starts, ends = row_starts.to(torch.int32), row_ends.to(torch.int32)
        return indexer_topk_prefill(scores.detach(), starts, ends, k)
