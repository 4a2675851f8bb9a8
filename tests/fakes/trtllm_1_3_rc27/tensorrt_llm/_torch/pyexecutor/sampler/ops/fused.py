"""The fused sampler of pull request 18515, in PyTorch."""

from __future__ import annotations

from typing import Optional

import torch

calls: list[str] = []
"""Which functions have computed."""


def _weights(name, logits, temperatures, top_ks, top_ps, min_ps):
    """Weights of the tokens that each row keeps: all that tie with the last one, as the kernel has it."""
    calls.append(name)
    if min_ps is None:
        raise TypeError("min_ps: the op takes a tensor")
    rows, width = logits.shape
    temperatures, top_ks, top_ps, min_ps = (
        each[:rows, None] for each in (temperatures, top_ks, top_ps, min_ps)
    )
    scaled = logits.float() / (temperatures + 1e-6)
    weights = torch.exp(scaled - scaled.amax(1, keepdim=True))
    weights = torch.where(weights >= min_ps, weights, 0)
    ranked = weights.sort(1, descending=True).values
    last = torch.where((top_ks > 0) & (top_ks < width), top_ks, width) - 1
    weights = torch.where(weights >= ranked.gather(1, last.long()), weights, 0)
    ranked = weights.sort(1, descending=True).values
    before = ranked.cumsum(1) - ranked
    cut = (before <= top_ps * ranked.sum(1, keepdim=True)) & (top_ps < 1)
    least = torch.where(cut, ranked, torch.inf).amin(1, keepdim=True)
    return torch.where((weights >= least) | (top_ps >= 1), weights, 0)


def _tokens(weights, seed, offset):
    rows = len(weights)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1.0)  # of NaN
    zero = torch.zeros(1, dtype=torch.int64)
    seed, offset = (zero, zero) if seed is None or offset is None else (seed, offset)
    tokens = []
    for row in range(rows):
        numbers = (int(each[row if each.numel() > 1 else 0]) for each in (seed, offset))
        noise = torch.Generator().manual_seed(hash((*numbers, row)) % (1 << 63))
        tokens.append(torch.multinomial(weights[row], 1, generator=noise))
    return torch.cat(tokens).to(torch.int32) if tokens else torch.empty(0, dtype=torch.int32)


def fused_sample_from_logits(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    *,
    seed: Optional[torch.Tensor] = None,
    offset: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    return _tokens(_weights("tokens", logits, temperatures, top_ks, top_ps, min_ps), seed, offset)


def fused_sample_from_logits_with_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    *,
    seed: Optional[torch.Tensor] = None,
    offset: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = _weights("both", logits, temperatures, top_ks, top_ps, min_ps)
    return _tokens(weights, seed, offset), weights / weights.sum(1, keepdim=True)


def fused_compute_probs_from_logits(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> torch.Tensor:
    weights = _weights("probs", logits, temperatures, top_ks, top_ps, min_ps)
    return weights / weights.sum(1, keepdim=True)
