"""What the ops of the kernel benchmark have to give at each step of a chain, and whether they do.

The two-level indexer of DeepSeek-V4.1 has a source, which selects positions and blocks of its own rows, and
consumers, each of which selects in the blocks that the step before has published: its scores are much alike,
and no launch finds the rows that it reads in a cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eval.bench.kernel_timing import Chain
from gvr_topk.contract import best_blocks, exact_topk, exact_topk_in_blocks, order_key

BLOCKS_GROUP = "v41"
BLOCK_K = 2048
"""Blocks that the source of DeepSeek-V4.1 publishes for each row."""

ORACLE_ELEMENTS = 1 << 26
"""Scores that an oracle ranks at a time: it takes some sixty bytes for each."""


def _of_parts(chain: Chain, oracle: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
    """An oracle's answers to every step, ``[count, batch, items]``, some rows at a time."""
    rows = chain.logits.flatten(0, 1)
    lengths = chain.lengths.expand(chain.count, chain.batch).reshape(-1)
    step = max(1, ORACLE_ELEMENTS // rows.shape[1])
    parts = [slice(first, first + step) for first in range(0, len(rows), step)]
    return torch.cat([oracle(rows[part], lengths[part], part) for part in parts]).unflatten(
        0, (chain.count, chain.batch)
    )


def topk_results(chain: Chain) -> Tensor:
    """Positions of every step, ``[count, batch, k]``, int32."""
    return _of_parts(chain, lambda rows, lengths, _: exact_topk(rows, lengths, chain.k))


def given_blocks(chain: Chain) -> Tensor:
    """Blocks that the consumer of every step selects in: those of the step before; of the first, the last."""
    return _published_blocks(chain).roll(1, dims=0)


def _published_blocks(chain: Chain) -> Tensor:
    return _of_parts(chain, lambda rows, lengths, _: best_blocks(rows, lengths, BLOCK_K))


def source_results(chain: Chain) -> Tensor:
    """Positions and then blocks of every step, ``[count, batch, k + BLOCK_K]``, int32."""
    return torch.cat([topk_results(chain), _published_blocks(chain)], dim=2)


def consumer_results(chain: Chain) -> Tensor:
    """Positions that the consumer of every step selects, ``[count, batch, k]``, int32."""
    blocks = given_blocks(chain).flatten(0, 1)
    return _of_parts(
        chain, lambda rows, lengths, part: exact_topk_in_blocks(rows, lengths, blocks[part], chain.k)
    )


def same_values(got: Tensor, wanted: Tensor, logits: Tensor) -> bool:
    """Whether two selections, ``[rows, k]``, are the same multiset of values at distinct positions.

    Positions of -1 stand for nothing and must be as many in both.
    """
    got, wanted = got.to(torch.int64), wanted.to(torch.int64)
    if bool(((got < -1) | (got >= logits.shape[1])).any()):
        return False
    order = torch.sort(got, dim=1).values
    if bool(((order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)).any()):
        return False

    def chosen(positions: Tensor) -> Tensor:
        picked = order_key(logits.gather(1, positions.clamp(min=0)))
        return torch.sort(torch.where(positions >= 0, picked, -1), dim=1).values

    return torch.equal(chosen(got), chosen(wanted))
