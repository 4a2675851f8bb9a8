"""As the Triton kernels and ``torch.topk`` of vLLM's module do it, in torch."""

import torch


def _bounds(logits, row_ks, row_ke, row_repeat):
    row = torch.arange(len(logits), device=logits.device) // row_repeat
    starts = torch.zeros_like(row) if row_ks is None else row_ks[row].long()
    return starts[:, None], row_ke[row].long()[:, None]


def select_candidate_blocks(
    logits: torch.Tensor,
    row_ks: torch.Tensor | None,
    row_ke: torch.Tensor,
    topk_blocks: int,
    block_size: int,
    out: torch.Tensor,
    row_repeat: int = 1,
) -> None:
    rows, width = logits.shape
    blocks = -(-width // block_size)
    starts, ends = _bounds(logits, row_ks, row_ke, row_repeat)
    columns = starts + torch.arange(blocks * block_size, device=logits.device)
    values = logits.gather(1, columns.clamp(max=width - 1)).float()
    values = values.masked_fill(columns >= ends.clamp(max=width), -torch.inf)
    greatest = values.view(rows, blocks, block_size).amax(-1)  # NaN propagates
    newest = (ends - starts - 1) // block_size
    pinned = (ends > starts) & (torch.arange(blocks, device=logits.device) == newest)
    top = greatest.masked_fill(pinned, torch.inf).topk(min(topk_blocks, blocks), dim=-1)
    out[:, :topk_blocks] = -1
    chosen = torch.where(top.values != -torch.inf, top.indices, -1)
    out[:, : chosen.shape[1]] = chosen.flip(1)  # in no order that a test may rely on


def apply_candidate_mask(
    logits: torch.Tensor,
    row_ks: torch.Tensor | None,
    row_ke: torch.Tensor,
    candidate_blocks: torch.Tensor,
    block_size: int,
    row_repeat: int = 1,
) -> None:
    rows, width = logits.shape
    blocks = -(-width // block_size)
    starts, ends = _bounds(logits, row_ks, row_ke, row_repeat)
    flags = torch.zeros(rows, blocks + 1, dtype=torch.bool, device=logits.device)
    flags.scatter_(1, torch.where(candidate_blocks >= 0, candidate_blocks, blocks).long(), True)
    columns = torch.arange(width, device=logits.device)
    valid = (columns >= starts) & (columns < ends)
    kept = flags.gather(1, torch.where(valid, (columns - starts) // block_size, blocks))
    logits.masked_fill_(~(valid & kept), -torch.inf)
