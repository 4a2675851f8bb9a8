"""The functions of sgl_kernel that the DSA backends call."""

from typing import Optional

import torch
from sglang_base import CALLS, chosen, through_table


def fast_topk_v2(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: Optional[torch.Tensor] = None
) -> torch.Tensor:
    CALLS["fast_topk_v2"] += 1
    return chosen(score, lengths, topk, row_starts)


def fast_topk_transform_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    row_starts: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    CALLS["fast_topk_transform_fused"] += 1
    rows = torch.arange(score.shape[0], dtype=torch.int32)
    if row_starts is None and page_table_size_1.shape[0] == score.shape[0]:
        request = rows
    else:
        # Rows behind those of the last request get something: nobody reads it.
        request = (torch.searchsorted(cu_seqlens_q, rows, right=True) - 1).clamp(
            max=page_table_size_1.shape[0] - 1
        )
    return through_table(chosen(score, lengths, topk, row_starts), page_table_size_1, 1, request)


def fast_topk_transform_ragged_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk_indices_offset: torch.Tensor,
    topk: int,
    row_starts: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    CALLS["fast_topk_transform_ragged_fused"] += 1
    positions = chosen(score, lengths, topk, row_starts)
    return torch.where(positions < 0, -1, positions + topk_indices_offset[:, None]).to(torch.int32)
