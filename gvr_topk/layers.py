"""The ops as layers, which a model calls in place of ``torch.topk`` over its indexer's scores.

`IndexerTopk` and `IndexerTopkPrefill` are pure layers as Hugging Face's `kernels` library requires them:
without constructor or state, so that their ``forward`` can take the place of another layer's ``forward``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gvr_topk.arguments import Checks
from gvr_topk.ops import indexer_topk_decode, indexer_topk_prefill

_DECODE, _PREFILL = Checks("IndexerTopk"), Checks("IndexerTopkPrefill")


def _rows(scores: Tensor) -> Tensor:
    """Return scores as the ops take them: without a gradient, and each beside the next one of its row."""
    rows = scores.detach()
    # Not `contiguous`, which leaves a tensor without elements as it is.
    return rows if rows.stride(-1) == 1 else rows.clone(memory_format=torch.contiguous_format)


def _narrow(ends: Tensor, scores: Tensor) -> Tensor:
    """Convert lengths or ends of rows to int32; those that no row has count as the nearest that one has."""
    # In 64 bits first: numbers of 64 bits would wrap, and the width need not fit numbers of 8 bits.
    return ends.to(torch.int64).clamp(0, scores.shape[-1]).to(torch.int32)


def indexer_topk(scores: Tensor, lengths: Tensor | None, k: int) -> Tensor:
    """Select the `k` largest scores of every row, for scores of any number of dimensions.

    Parameters
    ----------
    scores : Tensor, ``[..., width]``, float32, bfloat16 or float16
        Indexer scores, such as ``[batch, queries, keys]``; masked scores may be ``-inf``. Any strides: scores
        whose inner stride is not 1 are copied.
    lengths : Tensor, ``[...]``, integer, or None
        Visible elements of each row; None: all. Lengths above `width` count as `width`, negative ones as 0.
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
    _DECODE.score_values("scores", scores)
    if scores.dim() < 1:
        raise _DECODE.fail("scores", "one dimension or more", list(scores.shape))
    outer, width = scores.shape[:-1], scores.shape[-1]
    count = math.prod(outer)  # numel() makes a plain integer of a symbolic one
    if lengths is None:
        visible = torch.full((count,), width, dtype=torch.int32, device=scores.device)
    else:
        _DECODE.integers("lengths", lengths, scores, tuple(outer))
        visible = _narrow(lengths.reshape(-1), scores)
    rows = _rows(scores.reshape(count, width))
    chosen = indexer_topk_decode(rows, visible, k)
    return chosen.reshape(*outer, chosen.shape[-1])


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
            Indexer scores, a row for each query token. Any strides: scores whose inner stride is not 1 are
            copied.
        row_starts, row_ends : Tensor, ``[rows]``, integer
            First column of each window, and one past its last column. Ends above `width` count as `width`,
            negative starts as 0.
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
        _PREFILL.score_values("scores", scores)
        if scores.dim() != 2:
            raise _PREFILL.fail("scores", "shape [rows, width]", list(scores.shape))
        _PREFILL.integers("row_starts", row_starts, scores, (scores.shape[0],))
        _PREFILL.integers("row_ends", row_ends, scores, (scores.shape[0],))
        starts, ends = _narrow(row_starts, scores), _narrow(row_ends, scores)
        return indexer_topk_prefill(_rows(scores), starts, ends, k)
