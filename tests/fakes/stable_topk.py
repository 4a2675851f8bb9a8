"""The top-k that the fakes compute themselves: stable sorts, and no code of this package."""

from __future__ import annotations

import torch


def chosen(score, lengths, topk, row_starts=None):
    """Row-local positions by descending scores, -1 padded; of equal scores the first ones; no sync."""
    columns = torch.arange(score.shape[1], device=score.device)
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    starts, lengths = starts.to(score.device)[:, None], lengths.to(score.device)[:, None]
    visible = ((columns >= starts) & (columns < starts + lengths)).to(torch.uint8)
    order = score.argsort(dim=1, descending=True, stable=True)
    # Behind all visible ones, however small these are, and NaN, which sorts first, among the others.
    order = order.gather(1, visible.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, :topk]
    out = torch.full((score.shape[0], topk), -1, dtype=torch.int32, device=score.device)
    rows = torch.where(visible.gather(1, order) > 0, order - starts, -1)
    out[:, : order.shape[1]] = rows.to(torch.int32)
    return out


def draft_lengths(seq_lens, next_n):
    """Keys that each row sees, where the last of a request's `next_n` rows sees all; no sync."""
    drafts = torch.arange(1 - next_n, 1, device=seq_lens.device)
    return (seq_lens[:, None].to(torch.int64) + drafts).flatten()
