"""The hash of a seed, a position and a token that vLLM and SGLang have, on integers of 64 bits."""

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
