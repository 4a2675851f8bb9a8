"""The ops of blocks: rows of every length, layout and content give the exact result, in every execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contents import CONTENTS, draw, int32, integers, rows_of_requests
from launches import captured, never_waiting
from oracle import POISON, check_guards, guarded, place
from torch import Tensor

from gvr_topk import indexer_topk_blocks, indexer_topk_decode, indexer_topk_in_blocks
from gvr_topk.constants import BLOCK_SIZE, MAX_CHOSEN_BLOCKS, MAX_WIDTH, ONE_LAUNCH_BLOCKS_WIDTH
from gvr_topk.contract import (
    DTYPES,
    best_blocks,
    drop_masked,
    exact_topk,
    exact_topk_in_blocks,
    started_rows,
)

V41 = (512, 2048)
"""Positions and blocks that DeepSeek-V4.1 selects."""
ONE = ONE_LAUNCH_BLOCKS_WIDTH
WIDE = (ONE + 1, 524_288, 1_048_576, MAX_WIDTH)
"""Widths that take three launches, the narrowest and the widest among them."""
SHAPES = (V41, (1, 2), (2047, 2048), (100, 513), (7, 1024))
NAN, INF = float("nan"), float("inf")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
ORACLE_ELEMENTS = 1 << 24


def some_rows(rows: int, width: int) -> list[slice]:
    """Parts of the rows that an oracle ranks at a time."""
    step = max(1, ORACLE_ELEMENTS // max(width, 1))
    return [slice(first, first + step) for first in range(0, rows, step)]


def run_blocks(
    logits: Tensor, seq_lens: Tensor, k: int, block_k: int, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Call the op on poisoned outputs, and check the guard words around them."""
    rows = len(logits)
    outputs = {"out": guarded(rows, k), "blocks": guarded(rows, block_k, gap=1)}
    given = {name: inner for name, (_, inner) in outputs.items()}
    indexer_topk_blocks(logits, seq_lens, k, block_k, **given, **arguments)
    for name, (buffer, inner) in outputs.items():
        check_guards(name, buffer, inner)
    return given["out"], given["blocks"]


def run_in_blocks(logits: Tensor, seq_lens: Tensor, blocks: Tensor, k: int, **arguments: Any) -> Tensor:
    """The same of the other op."""
    buffer, out = guarded(len(logits), k)
    indexer_topk_in_blocks(logits, seq_lens, blocks, k, out=out, **arguments)
    check_guards("out", buffer, out)
    return out


def assert_in_blocks(logits: Tensor, lengths: Tensor, blocks: Tensor, k: int, **arguments: Any) -> Tensor:
    got = run_in_blocks(logits, lengths, blocks, k, **arguments)
    visible = lengths.clamp(0, logits.shape[1])
    for part in some_rows(len(logits), BLOCK_SIZE * blocks.shape[1]):
        wanted = exact_topk_in_blocks(logits[part], visible[part], blocks[part], k)
        assert torch.equal(got[part], wanted)
    return got


def assert_exact(
    logits: Tensor, lengths: Tensor, k: int, block_k: int, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Both ops, where the second selects in what the first has chosen."""
    positions, blocks = run_blocks(logits, lengths, k, block_k, **arguments)
    starts, drop = arguments.get("row_starts"), arguments.get("drop_masked", False)
    visible = lengths.clamp(0, logits.shape[1])
    for part in some_rows(*logits.shape):
        rows, lengths_here = logits[part], visible[part]
        if starts is not None:
            rows, lengths_here = started_rows(rows, lengths_here, starts[part])
        assert torch.equal(blocks[part], best_blocks(rows, lengths_here, block_k, drop=drop))
        wanted = exact_topk(rows, lengths_here, k)
        assert torch.equal(positions[part], drop_masked(rows, wanted) if drop else wanted)
    if k > 0:
        assert torch.equal(run_in_blocks(logits, lengths, blocks, k, **arguments), positions)
    return positions, blocks


# ---------------------------------------------------------------- lengths and layouts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "block_k"), SHAPES)
@pytest.mark.parametrize("width", [ONE, *WIDE])
def test_rows_of_all_lengths(width: int, k: int, block_k: int, dtype: torch.dtype) -> None:
    """Around every bound: k, block_k blocks, the share of a warp, groups of 16 blocks, and the widest row."""
    about = [0, k, 8 * block_k, 8 * 2048, 8 * 4096, 8 * 8192, 8 * 8192 + 2048, 131_072, ONE - 9, width - 9]
    lengths = int32(*sorted({max(0, n + d) for n in about for d in (-9, -8, -7, -1, 0, 1, 7, 8, 9)}))
    logits = rows_of_requests(len(lengths), width, seed=k, noise=1.0).to(dtype)
    assert_exact(logits, lengths, k, block_k)
    assert_exact(logits, torch.full_like(lengths, width), k, block_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 14, 30])
@pytest.mark.parametrize("width", [16_392, 65_537, ONE])
def test_rows_that_a_cluster_shares(width: int, rows: int, dtype: torch.dtype) -> None:
    """Around what each CTA of a cluster of 16, 8, 4 or 2 takes of a row, and each of its threads."""
    about = [0, 8, 8 * 513, 8 * 2048, 8 * 8192, 8 * 16_384, 131_072 + 8, width - 9]
    lengths = sorted({max(0, n + d) for n in about for d in (-9, -8, -1, 0, 1, 8, 9)})
    logits = rows_of_requests(rows, width, seed=rows, noise=1.0).to(dtype)
    for first in range(0, len(lengths), rows):
        some = int32(*(lengths * 2)[first : first + rows])
        for start in (0, 3):
            starts = torch.full_like(some, start)
            for k, block_k in (V41, (2047, 2048), (0, 2)):
                assert_exact(logits, some, k, block_k, row_starts=starts, drop_masked=start > 0)


@pytest.mark.parametrize("width", [50_000, 400_000])
def test_rows_of_scores_and_of_given_blocks_may_overlap(width: int) -> None:
    row = rows_of_requests(1, width + 10_000)
    lengths = integers(0, width, 40, seed=3)
    assert_exact(row.expand(40, -1), lengths, *V41)
    assert_exact(row[0].as_strided((40, width), (1, 1)), lengths, *V41)
    given = given_blocks(1, 1000, width // BLOCK_SIZE, seed=2)
    assert_in_blocks(row[:, :width].expand(40, -1), lengths, given.expand(40, -1), 512)


@pytest.mark.parametrize("width", [20_000, 300_000])
def test_rows_that_lie_beyond_32_bits(width: int) -> None:
    """Rows so far apart that offsets of elements, and of bytes more so, need 64 bits."""
    rows, stride = 3, 1_200_000_000
    buffer = torch.empty(2 * stride + width, dtype=torch.bfloat16, device="cuda")
    logits = buffer.as_strided((rows, width), (stride, 1))
    logits.copy_(rows_of_requests(rows, width))
    assert_exact(logits, torch.full((rows,), width, dtype=torch.int32, device="cuda"), *V41)


def test_values_of_blocks_beyond_32_bits() -> None:
    rows = (1 << 31) // (MAX_WIDTH // BLOCK_SIZE) + 3
    row, lengths = rows_of_requests(1, MAX_WIDTH), integers(0, 9, rows, seed=1)
    lengths[[0, -1]] = MAX_WIDTH
    positions, blocks = indexer_topk_blocks(row.expand(rows, -1), lengths, *V41)
    for at in (slice(1), slice(1, 2), slice(rows - 2, rows - 1), slice(rows - 1, rows)):
        assert torch.equal(blocks[at], best_blocks(row, lengths[at], V41[1]))
        assert torch.equal(positions[at], exact_topk(row, lengths[at], V41[0]))


def test_no_rows_and_no_columns() -> None:
    for rows, width in ((0, 100), (0, 0), (3, 0), (0, ONE + 1)):
        lengths = torch.full((rows,), 7, dtype=torch.int32, device="cuda")
        assert_exact(torch.zeros(rows, width, device="cuda"), lengths, 3, 4)


# ---------------------------------------------------------------- contents


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize(("rows", "width"), [(24, 50_007), (3, ONE), (3, 524_288), (3, 300_001)])
def test_adversarial_contents(rows: int, width: int, name: str, dtype: torch.dtype) -> None:
    """Plateaus, infinities, NaN, denormals and clusters, of more blocks than are chosen."""
    scores = CONTENTS[name](rows, width, V41[0])
    if name == "denormals" and dtype != torch.float32:
        scores = scores.double() * {torch.bfloat16: 1e5, torch.float16: 1e38}[dtype]
    logits = place(scores.to(dtype), pad=width % 2, shift=0)
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    lengths[2::5] = 8 * V41[1] + 1
    assert_exact(logits, lengths, *V41)
    assert_exact(logits, lengths, 1, 33)
    assert_exact(logits, lengths, *V41, drop_masked=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "block_k"), [V41, (0, 2), (0, 2048), (7, 33)])
@pytest.mark.parametrize("width", [3000, 70_000, ONE, 400_003])
def test_masked_blocks_are_dropped(width: int, k: int, block_k: int, dtype: torch.dtype) -> None:
    """About as many unmasked blocks as are chosen, with one such score or eight, and the newest masked."""
    counts = [*range(4), *(max(0, about + d) for about in (k, block_k) for d in (-2, -1, 0, 1, 2))]
    rows, blocks = len(counts), -(-width // BLOCK_SIZE)
    rank = torch.rand(rows, blocks, generator=draw(block_k), device="cuda").argsort(dim=1).argsort(dim=1)
    unmasked = (rank < int32(*counts)[:, None]).repeat_interleave(BLOCK_SIZE, dim=1)[:, :width]
    alone = torch.arange(width, device="cuda") % BLOCK_SIZE == 5
    unmasked[::2] &= alone
    scores = rows_of_requests(rows, width, seed=k, noise=1.0).to(dtype)
    logits = scores.masked_fill(~unmasked, -INF)
    logits[:, -9:] = -INF
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    lengths[1::5] = integers(0, width, len(lengths[1::5]), seed=1)
    _, chosen = assert_exact(logits, lengths, k, block_k, drop_masked=True)
    for row, (found, n) in enumerate(zip(chosen.tolist(), lengths.tolist(), strict=True)):
        items = [block for block in found if block >= 0]
        assert items == found[: len(items)] and (n <= 0 or items[-1] == (n - 1) // BLOCK_SIZE), row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, 0.0, -INF])
@pytest.mark.parametrize("width", [70_000, 400_003])
def test_ties_of_blocks_and_the_newest(width: int, value: float, dtype: torch.dtype) -> None:
    """More blocks have the greatest score than are chosen, and the newest has none of it."""
    logits = torch.full((4, width), value, dtype=dtype, device="cuda")
    lengths = int32(width, width - 1, width - 7, 8 * 2049)
    for row, n in enumerate(lengths.tolist()):
        logits[row, (n - 1) // 8 * 8 :] = -INF
    positions, blocks = assert_exact(logits, lengths, *V41)
    assert blocks[:, -1].tolist() == [(n - 1) // 8 for n in lengths.tolist()]
    assert torch.equal(blocks[:, :-1], torch.arange(2047, device="cuda").expand(4, -1).to(torch.int32))
    assert torch.equal(positions, torch.arange(512, device="cuda").expand(4, -1).to(torch.int32))


# ---------------------------------------------------------------- given blocks


def given_blocks(rows: int, count: int, blocks: int, seed: int) -> Tensor:
    """Ascending blocks without repetition, the last of which are -1 in some rows."""
    rank = torch.rand(rows, blocks, generator=draw(seed), device="cuda").argsort(dim=1)[:, :count]
    chosen = rank.sort(dim=1).values.to(torch.int32)
    filled = integers(0, count + 1, rows, seed=seed + 1)
    filled[0] = count
    return torch.where(torch.arange(chosen.shape[1], device="cuda") < filled[:, None], chosen, -1)


def test_blocks_of_the_widest_rows() -> None:
    width = MAX_WIDTH
    logits = rows_of_requests(2, width)
    lengths = int32(width, width - 5)
    assert_in_blocks(logits, lengths, given_blocks(2, MAX_CHOSEN_BLOCKS, width // BLOCK_SIZE, seed=1), 512)


# ---------------------------------------------------------------- execution


@pytest.mark.parametrize("width", [ONE, 600_000])
def test_graph_replay_with_changed_lengths_and_rows(width: int) -> None:
    rows = 6
    k, block_k = V41
    source, consumer = rows_of_requests(rows, width, seed=1), rows_of_requests(rows, width, seed=3)
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    starts = torch.zeros_like(lengths)
    out, again = torch.empty(2, rows, k, dtype=torch.int32, device="cuda")
    blocks = torch.empty(rows, block_k, dtype=torch.int32, device="cuda")

    def step() -> None:
        options: dict[str, Any] = {"row_starts": starts, "pdl": True}
        indexer_topk_blocks(source, lengths, k, block_k, out=out, blocks=blocks, **options)
        indexer_topk_in_blocks(consumer, lengths, blocks, k, out=again, **options)

    graph = captured(step)
    for turn in range(12):
        source.copy_(rows_of_requests(rows, width, seed=10 + turn, noise=1.0))
        starts.copy_(integers(0, (1, 9, 5000)[turn % 3], rows, seed=turn))
        lengths.copy_(integers(0, (width - 9, 20_000, 600)[turn % 3] + 1, rows, seed=turn))
        for tensor in (out, again, blocks):
            tensor.fill_(POISON)
        graph.replay()
        moved, _ = started_rows(source, lengths, starts)
        assert torch.equal(blocks, best_blocks(moved, lengths, block_k))
        assert torch.equal(out, exact_topk(moved, lengths, k))
        assert torch.equal(
            again, exact_topk_in_blocks(started_rows(consumer, lengths, starts)[0], lengths, blocks, k)
        )


@pytest.mark.parametrize(("width", "words"), [(100_000, 0), (1_000_003, 125_004 + 1)])
def test_no_synchronization_and_no_memory_but_a_workspace(width: int, words: int) -> None:
    """A workspace has so many words for each row. It is given back."""
    logits, lengths = rows_of_requests(4, width), int32(width, 7, 0, 50_000)
    out = torch.empty(4, 512, dtype=torch.int32, device="cuda")
    blocks = torch.empty(4, 2048, dtype=torch.int32, device="cuda")

    def step() -> None:
        indexer_topk_blocks(logits, lengths, *V41, out=out, blocks=blocks)
        indexer_topk_in_blocks(logits, lengths, blocks, V41[0], out=out)

    step()
    before = torch.cuda.memory_stats()
    with never_waiting():
        step()
    for what in ("requested_bytes.all.allocated", "requested_bytes.all.freed"):
        assert torch.cuda.memory_stats()[what] - before[what] == 4 * len(logits) * words


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("width", [60_000, 524_288])
def test_same_result_every_time_and_everywhere(width: int, rows: int) -> None:
    logits = CONTENTS["ties at k"](rows, width, 512)
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    first = run_blocks(logits, lengths, *V41)
    for _ in range(20):
        again = run_blocks(logits, lengths, *V41)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    alone = run_blocks(logits[-1:], lengths[-1:], *V41)
    assert torch.equal(alone[0], first[0][-1:]) and torch.equal(alone[1], first[1][-1:])
    assert torch.equal(indexer_topk_decode(logits, lengths, V41[0]), first[0])


@pytest.mark.parametrize("name", ["lengths", "blocks", "logits", "starts"])
@pytest.mark.parametrize("width", [100_000, 300_000])
def test_rewritten_arguments_cannot_hang_or_corrupt(width: int, name: str) -> None:
    """Another stream keeps writing an argument while launches read it; guard words stay as they are."""
    rows = 64
    k, block_k = V41
    logits = rows_of_requests(rows, width)
    lengths = integers(0, width + 1, rows, seed=1)
    given = given_blocks(rows, block_k, width // BLOCK_SIZE, seed=2)
    buffers = {"out": guarded(rows, k), "blocks": guarded(rows, block_k), "again": guarded(rows, k)}
    starts = torch.zeros_like(lengths)
    target = {"lengths": lengths, "blocks": given, "logits": logits, "starts": starts}[name]
    words = target.view(torch.int32)
    contents = [
        torch.randint(low, high, words.shape, generator=draw(seed), device="cuda", dtype=torch.int32)
        for seed, (low, high) in enumerate([(INT_MIN, INT_MAX), (0, width // 8), (-2, 3), (0, width)])
    ]
    rewriter = torch.cuda.Stream()
    rewriter.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        with torch.cuda.stream(rewriter):
            for content in contents:
                words.copy_(content)
        for _ in range(2):
            for drop in (False, True):
                options: dict[str, Any] = {"row_starts": starts, "drop_masked": drop}
                results = {"out": buffers["out"][1], "blocks": buffers["blocks"][1]}
                indexer_topk_blocks(logits, lengths, k, block_k, **results, **options)
                indexer_topk_in_blocks(logits, lengths, given, k, out=buffers["again"][1], **options)
    torch.cuda.synchronize()
    for what, (buffer, inner) in buffers.items():
        check_guards(what, buffer, inner)
        limit = -(-width // BLOCK_SIZE) if what == "blocks" else width
        assert bool(((inner >= -1) & (inner < limit)).all()), f"{what}: an item that no row has"
    if name != "logits":
        lengths.fill_(width)
        given.copy_(given_blocks(rows, block_k, width // BLOCK_SIZE, seed=3))
        assert_exact(logits, lengths, k, block_k)
        assert_in_blocks(logits, lengths, given, k)


# ---------------------------------------------------------------- small enough for compute-sanitizer


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_rows_of_both_ops(dtype: torch.dtype) -> None:
    for width in (9, 515, 4099, 16_397, ONE + 3):
        for shift in (0, 1):
            logits = place(rows_of_requests(5, width).to(dtype), pad=3 * shift, shift=shift)
            lengths = integers(width // 2, width + 3, 5, seed=1)
            assert_exact(logits, lengths, 20, 33)
            starts = integers(0, width // 2, 5, seed=2)
            assert_exact(logits, lengths, 20, 33, row_starts=starts, drop_masked=True)
            blocks = torch.randint(-2, width // 8 + 3, (5, 70), generator=draw(1), device="cuda")
            assert_in_blocks(logits, lengths, blocks.to(torch.int32), 64)
