"""The ops of blocks on the CPU: contents, lengths, given blocks, errors, torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows import int32
from torch import Tensor

import gvr_topk
from gvr_topk import indexer_topk_blocks, indexer_topk_in_blocks
from gvr_topk.arguments import BlocksArguments, InBlocksArguments
from gvr_topk.constants import BLOCK_SIZE, MAX_CHOSEN_BLOCKS, MAX_WIDTH, ONE_LAUNCH_BLOCKS_WIDTH
from gvr_topk.contract import DTYPES
from gvr_topk.evaluation.oracle import sorted_blocks, sorted_in_blocks, sorted_topk

OPS = {
    "blocks": torch.ops.gvr_topk.indexer_topk_blocks.default,
    "in_blocks": torch.ops.gvr_topk.indexer_topk_in_blocks.default,
}
ROWS, WIDTH, K, BLOCK_K = 6, 203, 5, 7
NAN, INF = math.nan, math.inf
INT_MAX = 2**31 - 1


LENGTHS = int32(WIDTH, 0, 3, 57, 58, 160)


def scores(rows: int = ROWS, width: int = WIDTH, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with many ties, of positions and of blocks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 40, (rows, width), generator=generator).to(dtype)


def agree(
    logits: Tensor, lengths: Tensor, k: int = K, block_k: int = BLOCK_K, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call both ops, which have to give what is expected, and the same positions."""
    positions, blocks = indexer_topk_blocks(logits, lengths, k, block_k, **options)
    assert positions.dtype == blocks.dtype == torch.int32
    assert torch.equal(positions, sorted_topk(logits, lengths, k))
    assert torch.equal(blocks, sorted_blocks(logits, lengths, block_k))
    again = indexer_topk_in_blocks(logits, lengths, blocks, k, **options)
    assert torch.equal(again, positions), "the top k lie in the chosen blocks"
    more = indexer_topk_in_blocks(logits, lengths, blocks, 20)
    assert torch.equal(more, sorted_in_blocks(logits, lengths, blocks, 20))
    return positions, blocks


# ---------------------------------------------------------------- contents and lengths


def test_the_newest_block_is_chosen_whatever_it_holds() -> None:
    """Blocks with NaN are as many as are chosen, and stand before it."""
    logits = torch.full((1, 64), NAN)
    logits[0, 57:] = -INF
    for n, newest in ((64, 7), (58, 7), (57, 7), (56, 6), (49, 6), (48, 5)):
        _, blocks = agree(logits, int32(n), 1, 3)
        assert blocks.tolist() == [[0, 1, newest]]


def test_a_block_with_nan_ranks_above_infinity() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 3], logits[0, 12], logits[0, 33] = INF, NAN, 1.0
    for block_k, wanted in ((2, [1, 7]), (3, [0, 1, 7]), (4, [0, 1, 4, 7])):
        assert agree(logits, int32(64), 1, block_k)[1].tolist() == [wanted]


def test_equal_blocks_go_to_the_smallest_numbers() -> None:
    logits = torch.zeros(1, 80)
    logits[0, 40] = 1.0
    assert agree(logits, int32(80), 2, 4)[1].tolist() == [[0, 1, 5, 9]]


def test_the_fewest_blocks_for_k() -> None:
    """The k largest scores lie in k blocks, none of which is the newest, so that k + 1 are needed."""
    logits = torch.zeros(1, 80)
    logits[0, [3, 20, 44, 61]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    positions, blocks = agree(logits, int32(80), 4, 5)
    assert positions.tolist() == [[3, 20, 44, 61]] and blocks.tolist() == [[0, 2, 5, 7, 9]]


@pytest.mark.parametrize("width", [*(ONE_LAUNCH_BLOCKS_WIDTH + n for n in (0, 1, 8)), 524_288, MAX_WIDTH])
def test_the_widest_row_and_the_most_blocks(width: int) -> None:
    logits = torch.zeros(1, width)
    logits[0, -9] = 1.0
    most = MAX_CHOSEN_BLOCKS
    positions, blocks = indexer_topk_blocks(logits, int32(width), most - 1, most)
    last = (width - 1) // BLOCK_SIZE
    assert blocks.tolist() == [[*range(MAX_CHOSEN_BLOCKS - 2), last - 1, last]]
    assert positions.tolist() == [[*range(MAX_CHOSEN_BLOCKS - 2), width - 9]]


def test_rows_of_scores_may_overlap() -> None:
    lengths = torch.full((ROWS,), WIDTH, dtype=torch.int32)
    agree(scores(1).expand(ROWS, WIDTH), lengths)
    agree(scores(1, width=WIDTH + ROWS - 1)[0].as_strided((ROWS, WIDTH), (1, 1)), lengths)


@pytest.mark.parametrize(("rows", "width"), [(0, 10), (0, 0), (2, 0)])
def test_nothing_to_select_from(rows: int, width: int) -> None:
    lengths = torch.full((rows,), 5, dtype=torch.int32)
    positions, blocks = indexer_topk_blocks(torch.empty(rows, width), lengths, 3, 4)
    assert positions.tolist() == [[-1] * 3] * rows and blocks.tolist() == [[-1] * 4] * rows
    assert indexer_topk_in_blocks(torch.empty(rows, width), lengths, blocks, 3).tolist() == [[-1] * 3] * rows


def test_results_are_written_in_place_and_no_further() -> None:
    out = torch.full((ROWS, K + 3), -7, dtype=torch.int32)
    blocks = torch.full((ROWS, BLOCK_K + 2), -7, dtype=torch.int32)
    got = indexer_topk_blocks(scores(), LENGTHS, K, BLOCK_K, out=out, blocks=blocks)
    assert got[0] is out and got[1] is blocks
    assert (out[:, K:] == -7).all() and (out[:, :K] != -7).all()
    assert (blocks[:, BLOCK_K:] == -7).all() and (blocks[:, :BLOCK_K] != -7).all()
    again = torch.full((ROWS, K + 3), -7, dtype=torch.int32)
    assert indexer_topk_in_blocks(scores(), LENGTHS, blocks[:, :BLOCK_K], K, out=again) is again
    assert torch.equal(again, out)


# ---------------------------------------------------------------- rows that start anywhere, masked blocks


def test_masked_blocks_are_dropped_but_for_the_newest() -> None:
    logits = torch.full((4, 64), -INF)
    logits[1, 11] = logits[2, 60] = -1.0
    logits[3, 20], logits[3, 33] = NAN, INF
    lengths = int32(64, 64, 64, 16)
    options = {"drop_masked": True}
    positions, blocks = indexer_topk_blocks(logits, lengths, 2, 3, **options)
    assert blocks.tolist() == [[7, -1, -1], [1, 7, -1], [7, -1, -1], [1, -1, -1]]
    assert positions.tolist() == [[-1, -1], [11, -1], [60, -1], [-1, -1]]
    assert torch.equal(indexer_topk_in_blocks(logits, lengths, blocks, 2, **options), positions)
    _, blocks = indexer_topk_blocks(logits[3:], int32(64), 2, 3, **options)
    assert blocks.tolist() == [[2, 4, 7]]


def test_in_blocks_out_of_order_masked_scores_are_dropped_where_they_are() -> None:
    logits = torch.full((1, 32), -INF)
    logits[0, [1, 9, 25]] = torch.tensor([1.0, 2.0, 3.0])
    got = indexer_topk_in_blocks(logits, int32(32), int32(3, 0, 1).view(1, 3), 5, drop_masked=True)
    assert got.tolist() == [[25, 1, 9, -1, -1]]


def test_blocks_alone() -> None:
    positions, blocks = indexer_topk_blocks(scores(), LENGTHS, 0, BLOCK_K)
    assert positions.shape == (ROWS, 0) and torch.equal(blocks, agree(scores(), LENGTHS)[1])


# ---------------------------------------------------------------- given blocks


def test_all_blocks_in_order_are_the_whole_row() -> None:
    blocks = torch.arange(-(-WIDTH // BLOCK_SIZE), dtype=torch.int32).expand(ROWS, -1)
    for k in (1, K, 100, WIDTH, 2 * WIDTH):
        wanted = gvr_topk.indexer_topk_decode(scores(), LENGTHS, k)
        assert torch.equal(indexer_topk_in_blocks(scores(), LENGTHS, blocks, k), wanted)


def test_blocks_of_a_wide_row() -> None:
    logits = torch.zeros(1, MAX_WIDTH)
    logits[0, -3] = 1.0
    last = MAX_WIDTH // BLOCK_SIZE - 1
    got = indexer_topk_in_blocks(logits, int32(MAX_WIDTH), int32(5, last).view(1, 2), 2)
    assert got.tolist() == [[40, MAX_WIDTH - 3]]


def described(op: str, **changes: Any) -> Any:
    """A valid call as the op sees it, some arguments of it replaced."""
    arguments: dict[str, Any] = {
        "logits": scores(),
        "seq_lens": LENGTHS,
        "out": torch.zeros(ROWS, K, dtype=torch.int32),
        "blocks": torch.zeros(ROWS, BLOCK_K, dtype=torch.int32),
        "k": K,
        "row_starts": int32(*range(ROWS)),
    }
    if op == "in_blocks":
        return InBlocksArguments(**{**arguments, **changes})
    return BlocksArguments(**{**arguments, "block_k": BLOCK_K, **changes})


# ---------------------------------------------------------------- torch.library and torch.compile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    changes = {
        "logits": scores(width=2 * WIDTH, dtype=dtype)[:, :WIDTH],
        "out": torch.zeros(ROWS, K + 2, dtype=torch.int32),
    }
    torch.library.opcheck(OPS[op], tuple(described(op, **changes)))


def two_layers(source: Tensor, consumer: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions, blocks = indexer_topk_blocks(source * 2, lengths, K, BLOCK_K)
    return positions, blocks, indexer_topk_in_blocks(consumer, lengths, blocks, K)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str, dynamic: bool) -> None:
    options = {"fullgraph": True, "backend": backend, "dynamic": dynamic or None}
    compiled: Callable[..., Any] = torch.compile(two_layers, **options)
    for rows in (ROWS, ROWS + 3):
        source, consumer = scores(rows, seed=1), scores(rows, seed=2)
        lengths = torch.arange(50, 50 + 20 * rows, 20, dtype=torch.int32).clamp(max=WIDTH)
        got, wanted = compiled(source, consumer, lengths), two_layers(source, consumer, lengths)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert [tensor.shape for tensor in got] == [(rows, K), (rows, BLOCK_K), (rows, K)]
        assert torch.equal(got[2], sorted_in_blocks(consumer, lengths, got[1], K))
