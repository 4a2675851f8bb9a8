"""The two-level indexer of DeepSeek-V4.1 in the kernel benchmark: what its ops have to give at each step.

The source of a step is its own rows. Its consumer selects in the blocks that the step before has published,
whose scores are much alike, so that no launch finds the rows that it reads in a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eval.bench.kernel_timing import Chain
from gvr_topk.contract import best_blocks, exact_topk, exact_topk_in_blocks

GROUP = "v41"
BLOCK_K = 2048
"""Blocks that the source of DeepSeek-V4.1 publishes for each row."""

ORACLE_ELEMENTS = 1 << 26
"""Scores that an oracle ranks at a time."""


def _parts(chain: Chain) -> list[tuple[slice, Tensor, Tensor]]:
    """Rows of all steps, some at a time: which they are, their scores and their lengths."""
    rows = chain.logits.flatten(0, 1)
    lengths = chain.lengths.expand(chain.count, chain.batch).reshape(-1)
    step = max(1, ORACLE_ELEMENTS // rows.shape[1])
    parts = [slice(first, first + step) for first in range(0, len(rows), step)]
    return [(part, rows[part], lengths[part]) for part in parts]


def published_blocks(chain: Chain) -> Tensor:
    """Best blocks of every step, ``[count, batch, BLOCK_K]``, int32."""
    found = [best_blocks(rows, lengths, BLOCK_K) for _, rows, lengths in _parts(chain)]
    return torch.cat(found).view(chain.count, chain.batch, BLOCK_K)


def given_blocks(chain: Chain) -> Tensor:
    """Blocks that the consumer of every step selects in: those of the step before; of the first, the last."""
    return published_blocks(chain).roll(1, dims=0)


def source_results(chain: Chain) -> Tensor:
    """Positions and then blocks of every step, ``[count, batch, k + BLOCK_K]``, int32."""
    found = [exact_topk(rows, lengths, chain.k) for _, rows, lengths in _parts(chain)]
    positions = torch.cat(found).view(chain.count, chain.batch, chain.k)
    return torch.cat([positions, published_blocks(chain)], dim=2)


def consumer_results(chain: Chain) -> Tensor:
    """Positions that the consumer of every step selects, ``[count, batch, k]``, int32."""
    blocks = given_blocks(chain).flatten(0, 1)
    found = [
        exact_topk_in_blocks(rows, lengths, blocks[part], chain.k) for part, rows, lengths in _parts(chain)
    ]
    return torch.cat(found).view(chain.count, chain.batch, chain.k)
