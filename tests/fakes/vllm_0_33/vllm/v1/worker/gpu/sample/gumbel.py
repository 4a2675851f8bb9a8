"""vLLM draws with a Triton kernel; here PyTorch's functions on integers of 64 bits stand in for it."""

import torch

LOW = 0xFFFFFFFF


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & LOW


def murmur3_hash32(
    seed: torch.Tensor, pos: torch.Tensor, token: torch.Tensor, domain: int = 0
) -> torch.Tensor:
    h = torch.full_like(seed + pos + token, domain)
    for word in (seed & LOW, (seed >> 32) & LOW, pos & LOW, token):
        key = _rotate((word * 0xCC9E2D51) & LOW, 15)
        h = h ^ ((key * 0x1B873593) & LOW)
        h = (_rotate(h, 13) * 5 + 0xE6546B64) & LOW
    h = h ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & LOW
    return h ^ (h >> 16)


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
