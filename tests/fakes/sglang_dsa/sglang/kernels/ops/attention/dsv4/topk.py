from typing import Optional

import torch
from sglang_base import CALLS, chosen, through_table


def topk_transform_512_v2(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: Optional[torch.Tensor],
    out_page_indices: torch.Tensor,
    page_size: int,
    metadata: torch.Tensor,
    out_raw_indices: Optional[torch.Tensor] = None,
) -> None:
    CALLS["topk_transform_512_v2"] += 1
    positions = chosen(scores, seq_lens, out_page_indices.shape[1], None)
    if out_raw_indices is not None:
        out_raw_indices.copy_(positions)
    if page_tables is not None:
        positions = through_table(positions, page_tables, page_size, torch.arange(scores.shape[0]))
    out_page_indices.copy_(positions)


def topk_transform_ragged_v2(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out_offsets: torch.Tensor,
    out_indices: torch.Tensor,
    row_starts: Optional[torch.Tensor] = None,
) -> None:
    CALLS["topk_transform_ragged_v2"] += 1
    positions = chosen(scores, seq_lens, out_indices.shape[1], row_starts)
    out_indices.copy_(torch.where(positions < 0, -1, positions + out_offsets[:, None]))
