"""The scorer: what a query holds are its scores for all keys of its chunk."""

import torch


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    max_seqlen_k: int,
) -> torch.Tensor:
    """Column 0 of a row is its first key; what lies behind its last one is whatever was in memory."""
    values, scales = q
    assert scales is None and len(values) == len(weights)
    logits = torch.full((len(values), max_seqlen_k), 7e33, device=values.device)
    for row, (start, end) in enumerate(zip(cu_seqlen_ks.tolist(), cu_seqlen_ke.tolist(), strict=True)):
        assert 0 <= start <= max(end, start) <= len(kv[0]) and end - start <= max_seqlen_k
        if end > start:
            logits[row, : end - start] = values[row, start:end]
    return logits
