"""The top-k that the fakes compute themselves: a stable sort of each row, and no code of this package."""

from __future__ import annotations

import torch


def chosen(score, lengths, topk, row_starts=None):
    """Row-local positions in descending order of scores, -1 padded; of equal scores the first ones."""
    out = torch.full((score.shape[0], topk), -1, dtype=torch.int32, device=score.device)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[row])
        visible = score[row, start : start + max(length, 0)]
        order = visible.argsort(descending=True, stable=True)[:topk]
        out[row, : len(order)] = order.to(torch.int32)
    return out


def draft_lengths(seq_lens, next_n):
    """Keys that each row sees, where the last of a request's `next_n` rows sees all; no sync."""
    drafts = torch.arange(1 - next_n, 1, device=seq_lens.device)
    return (seq_lens[:, None].to(torch.int64) + drafts).flatten()
