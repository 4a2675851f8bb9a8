"""vLLM draws with a Triton kernel; here PyTorch's functions stand in for it."""

import torch
from murmur3 import murmur3_hash32


def _noise32(seed: torch.Tensor, pos: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    random = murmur3_hash32(seed, pos, token)
    u = (random >> 16).float() * 2.0**-16 + ((random & 0xFFFF).float() + 0.5) * 2.0**-32
    series = sum(-(u**power) / power for power in range(8, 0, -1))
    direct = (1 - u).clamp(min=2.0**-24).log()
    return -torch.where(u < 0.25, series, direct).neg().log()


def _noise64(seed: torch.Tensor, pos: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    low, high = murmur3_hash32(seed, pos, token), murmur3_hash32(seed, pos, token, 0x9E3779B9)
    u = ((high << 21 | low >> 11).double() + 0.5) * 2.0**-53
    return -(-u.log()).log()


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    use_fp64: bool = False,
) -> torch.Tensor:
    """A row without a request is greedy."""
    slots = expanded_idx_mapping.clamp(min=0)
    greedy = (expanded_idx_mapping < 0) | (temperature[slots] == 0)
    token = torch.arange(logits.shape[1], device=logits.device)
    noise = (_noise64 if use_fp64 else _noise32)(seed[slots, None], pos[:, None], token)
    return (logits.float() + noise.masked_fill(greedy[:, None], 0)).argmax(1)
