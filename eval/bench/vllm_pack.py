"""A Triton kernel that packs candidates as vLLM's does: scores of positions, and their places in the row."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 512


@triton.jit
def _pack(
    scores: tl.tensor,
    best: tl.tensor,
    packed: tl.tensor,
    width: tl.tensor,
    k: tl.constexpr,
    rank: tl.constexpr,
    world: tl.constexpr,
    turn: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < k
    local = tl.load(best + row * k + column, mask=inside, other=-1)
    score = tl.load(scores + row * width + local, mask=inside & (local >= 0), other=-float("inf"))
    place = (local // turn * world + rank) * turn + local % turn
    at = packed + 2 * (row * k + column)
    tl.store(at, score, mask=inside)
    tl.store(at + 1, tl.where(local >= 0, place, -1).to(tl.float32), mask=inside)


def pack(scores: Tensor, best: Tensor, rank: int, world: int, turn: int) -> Tensor:
    """Pack contiguous rows, ``[rows, 2 * k]``, float32."""
    rows, k = best.shape
    packed = torch.empty((rows, 2 * k), dtype=torch.float32, device=scores.device)
    grid = (rows, triton.cdiv(k, BLOCK))
    _pack[grid](scores, best, packed, scores.shape[1], k, rank, world, turn, BLOCK, num_warps=8)
    return packed
