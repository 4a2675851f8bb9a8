"""The prefill op: windows of every length, place and content give the exact result, in every execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contents import CONTENTS, draw, int32, integers, rows_of_requests
from launches import captured, unobtrusive
from oracle import (
    POISON,
    Written,
    cuts,
    place,
    run_prefill,
    run_slices,
    sorted_windows,
    wrong_windows,
)
from torch import Tensor

from gvr_topk import indexer_topk_prefill
from gvr_topk.arguments import PrefillArguments
from gvr_topk.constants import MAX_WIDTH, GuessSource, HintReason, StatsColumn
from gvr_topk.contract import DTYPES

PATHS = ("auto", "radix_rounds")
EVERY_K = (1, 7, 128, 512, 1024, 2048, 2049, 5000)
NAN, INF = float("nan"), float("inf")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def assert_exact(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, path: str = "auto", **arguments: Any
) -> Written:
    """Compare a call, and whether the kernel of long rows and slices of the columns give the same."""
    written = run_prefill(logits, starts, ends, k, path=path, **arguments)
    assert wrong_windows(written, logits, starts, ends, k) == []
    # Another kernel takes the rows that registers hold.
    streamed = run_prefill(logits, starts, ends, k, streams=True, path=path, **arguments)
    assert torch.equal(streamed.out, written.out) and torch.equal(streamed.counts, written.counts)
    if path == "auto":  # which makes no difference to slices
        width = logits.shape[1]
        out, counts = run_slices(logits, starts, ends, k, cuts(width, 4, seed=width + k))
        assert torch.equal(out, written.out) and torch.equal(counts, written.counts)
    return written


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", EVERY_K)
def test_windows_of_all_lengths(k: int, dtype: torch.dtype) -> None:
    lengths = int32(0, 1, k - 1, k, k + 1, 2 * k, 4095, 4096, 4097, 8192, 32_768, 131_072, 300_000).repeat(2)
    rows, width = len(lengths), 300_040
    logits = place(rows_of_requests(rows, width, seed=k).to(dtype), pad=3)
    starts = torch.minimum(integers(0, width, rows, seed=k), width - lengths)
    assert_exact(logits, starts, starts + lengths, k)
    assert_exact(logits, starts.flip(0), (starts + lengths).flip(0), k, path="radix_rounds")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_longest_windows(dtype: torch.dtype, path: str) -> None:
    width = MAX_WIDTH
    logits = rows_of_requests(5, width, noise=0.01).to(dtype)
    starts = int32(0, 3, width // 2, 77, 5)
    ends = int32(width, 3 + (1 << 20), width, width, 600_005)
    for k in (128, 2048, 5000):
        assert_exact(logits, starts, ends, k, path=path)


def test_windows_at_the_ends_of_int32() -> None:
    every = (INT_MIN, INT_MIN + 1, -1, 0, 1, 4999, 5000, 5001, INT_MAX - 1, INT_MAX)
    starts = int32(*(start for start in every for _ in every))
    ends = int32(*every).repeat(len(every))
    logits = rows_of_requests(len(starts), 5000)
    for k in (7, 2048, 5000):
        assert_exact(logits, starts, ends, k)


@pytest.mark.parametrize("k", [128, 2048])
@pytest.mark.parametrize("rows", [1, 7, 133, 2500])
@pytest.mark.parametrize("before", [0, 3000, 60_000])
def test_a_causal_chunk(before: int, rows: int, k: int) -> None:
    """The rows of one request, whose windows grow by one; the first of them may be shorter than k."""
    width = before + rows + 5
    logits = rows_of_requests(rows, width, seed=before)
    ends = torch.arange(before + 1, before + rows + 1, dtype=torch.int32, device="cuda")
    for dtype in (torch.float32, torch.bfloat16) if before == 3000 else (torch.float32,):
        assert_exact(logits.to(dtype), torch.full_like(ends, 3), ends, k)


@pytest.mark.parametrize("requests", [2, 40, 333])
def test_many_requests_in_one_call(requests: int) -> None:
    """Requests lie one behind the other in the columns, as vLLM lays them out; each has its own scale."""
    rows, width = 999, 70_000
    logits = rows_of_requests(rows, width, seed=requests, requests=requests)
    request = torch.arange(rows, device="cuda") // -(-rows // requests)
    logits *= 10.0 ** (request % 7 - 3)[:, None]
    bounds = torch.linspace(0, width, requests + 1, device="cuda").to(torch.int32)
    within = torch.arange(rows, device="cuda") % -(-rows // requests)
    starts, last = bounds[request], bounds[request + 1]
    ends = torch.minimum(last, last - -(-rows // requests) + within.to(torch.int32) + 1)
    for k in (128, 2048):
        assert_exact(logits, starts, ends, k)
        shuffled = torch.randperm(rows, generator=draw(k), device="cuda")
        assert_exact(logits[shuffled], starts[shuffled], ends[shuffled], k)


def test_rows_of_scores_may_overlap() -> None:
    row = rows_of_requests(1, 30_000)
    starts, ends = integers(0, 9000, 300, seed=3), integers(8000, 29_000, 300, seed=4)
    for logits in (row.expand(300, -1), row[0].as_strided((300, 29_000), (1, 1))):
        assert_exact(logits, starts, ends, 2048)


@pytest.mark.parametrize("k", [5000, 100_000, MAX_WIDTH])
def test_more_items_than_a_window_holds(k: int) -> None:
    logits = rows_of_requests(3, 40_000)
    assert_exact(logits, int32(0, 1, 39_999), int32(40_000, 4999, 40_000), k)


def test_no_rows_and_no_columns() -> None:
    for rows, width in ((0, 100), (0, 0), (3, 0)):
        ends = torch.full((rows,), 7, dtype=torch.int32, device="cuda")
        assert_exact(torch.zeros(rows, width, device="cuda"), torch.zeros_like(ends), ends, 8)


# ---------------------------------------------------------------- contents


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [128, 2048])
@pytest.mark.parametrize("name", CONTENTS)
def test_adversarial_contents(name: str, k: int, dtype: torch.dtype) -> None:
    """More rows than CTAs, so that rows follow each other; a window of each ends where k barely fits."""
    rows, width = 300, 7001
    scores = CONTENTS[name](rows, width, k)
    if name == "denormals" and dtype != torch.float32:
        scores = scores.double() * {torch.bfloat16: 1e5, torch.float16: 1e38}[dtype]
    logits = place(scores.to(dtype), pad=2, shift=1)
    starts = integers(0, 20, rows, seed=k)
    ends = torch.where(torch.arange(rows, device="cuda") % 9 == 5, starts + k + 1, width).to(torch.int32)
    for path in PATHS:
        assert_exact(logits, starts, ends, k, path=path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTENTS)
def test_adversarial_contents_of_long_rows(name: str, dtype: torch.dtype) -> None:
    rows, width, k = 7, 150_000, 2048
    logits = CONTENTS[name](rows, width, k).to(dtype)
    starts, ends = integers(0, 99, rows, seed=1), width - integers(0, 99, rows, seed=2)
    assert_exact(logits, starts, ends, k)
    # The rows of one run come one behind the other whatever the grid: one window, many times.
    many = logits.repeat(40, 1)[:, :20_000]
    narrow = torch.full((len(many),), 20_000, dtype=torch.int32, device="cuda")
    assert_exact(many, torch.zeros_like(narrow), narrow, k)


def test_scores_of_more_than_32_bits_of_elements() -> None:
    """Row 65,536 begins at element 2**31; then three rows that lie 1.1 billion elements apart."""
    rows, width, k = 70_000, 32_768, 512
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("wanted 12 GiB of free GPU memory")
    logits = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda", generator=draw(9))
    starts = integers(0, width - 2000, rows, seed=9)
    ends = starts + integers(400, 2000, rows, seed=10)
    starts[-20:], ends[-20:] = 0, width
    assert_exact(logits, starts, ends, k)
    apart = logits.view(-1).as_strided((3, width), (1_100_000_000, 1))
    assert_exact(apart, int32(0, 1, 2), int32(width, width, width), k)
    del logits, apart
    torch.cuda.empty_cache()


# ---------------------------------------------------------------- execution


def chunk_of(rows: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A causal chunk at the end of its buffer."""
    ends = torch.arange(width - rows + 1, width + 1, dtype=torch.int32, device="cuda")
    return rows_of_requests(rows, width, seed), torch.zeros_like(ends), ends


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["normal", "few values", "half positive", "ties at k", "any kind in turn"])
def test_the_same_result_every_time(name: str, path: str) -> None:
    rows, width, k = 600, 9000, 1024
    logits = CONTENTS[name](rows, width, k)
    starts, ends = integers(0, 50, rows, seed=1), integers(3000, width, rows, seed=2)
    wanted, _ = sorted_windows(logits, starts, ends, k)
    for _ in range(20):
        assert torch.equal(run_prefill(logits, starts, ends, k, path=path).out, wanted)
    order = torch.randperm(rows, generator=draw(1), device="cuda")
    elsewhere = run_prefill(logits[order], starts[order], ends[order], k, path=path)
    assert torch.equal(elsewhere.out, wanted[order])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pdl", [False, True])
def test_graph_replay_with_changed_windows(pdl: bool, path: str) -> None:
    rows, width, k = 400, 20_000, 2048
    logits, starts, ends = chunk_of(rows, width)
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    counts = torch.empty(rows, dtype=torch.int32, device="cuda")

    def step() -> None:
        indexer_topk_prefill(logits, starts, ends, k, out=out, counts=counts, path=path, pdl=pdl)

    graph = captured(step)
    for turn in range(8):
        starts.copy_(integers(-50, width, rows, seed=turn))
        ends.copy_(integers(-50, width + 50, rows, seed=turn + 100))
        if turn % 2:
            starts.zero_()
        if turn % 3 == 2:
            logits.copy_(rows_of_requests(rows, width, seed=turn))
        out.fill_(POISON)
        counts.fill_(POISON)
        graph.replay()
        assert wrong_windows(Written(out, counts, None, None), logits, starts, ends, k) == [], turn


@pytest.mark.parametrize("pdl", [False, True])
def test_programmatic_launch_waits_for_scores_and_windows(pdl: bool) -> None:
    rows, width, k = 200, 16_000, 1024
    logits, starts, ends = (torch.zeros_like(t) for t in chunk_of(rows, width))
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    for seed in range(10):
        fresh, _, _ = chunk_of(rows, width, seed)
        first, last = integers(0, 99, rows, seed), integers(width - 99, width, rows, seed)
        torch.cuda.synchronize()
        logits.copy_(fresh)
        starts.copy_(first)
        ends.copy_(last)
        indexer_topk_prefill(logits, starts, ends, k, out=out, pdl=pdl)
        behind = out.clone()
        assert torch.equal(behind, sorted_windows(fresh, first, last, k)[0])


@pytest.mark.parametrize("path", PATHS)
def test_no_allocation_and_no_synchronization(path: str) -> None:
    chunk = chunk_of(300, 9000)
    out = torch.empty(300, 512, dtype=torch.int32, device="cuda")
    indexer_topk_prefill(*chunk, 512, out=out, path=path)
    with unobtrusive():
        indexer_topk_prefill(*chunk, 512, out=out, path=path)


def test_compile_fullgraph_and_opcheck() -> None:
    logits, starts, ends = chunk_of(40, 3000)

    def step(scores: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return indexer_topk_prefill(scores * 2, first, last + 0, 512)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits, starts, ends), step(logits, starts, ends))
    out, counts = torch.empty(40, 512, dtype=torch.int32, device="cuda"), torch.empty_like(starts)
    plain = PrefillArguments(logits, starts, ends, out, 512)
    for arguments in (plain, plain._replace(counts=counts, offsets=starts)):
        torch.library.opcheck(torch.ops.gvr_topk.indexer_topk_prefill, tuple(arguments))


# ---------------------------------------------------------------- statistics


def test_statistics_of_a_causal_chunk() -> None:
    """Most rows are predicted from the row before, and most predictions hold."""
    rows, width, k = 6000, 33_000, 2048
    logits, starts, ends = chunk_of(rows, width)
    plain = assert_exact(logits, starts, ends, k)
    written = assert_exact(logits, starts, ends, k, stats=True)
    assert torch.equal(plain.out, written.out) and written.stats is not None
    stats = written.stats.cpu()
    assert not (stats == POISON).any()
    reason, guess = stats[:, StatsColumn.REASON], stats[:, StatsColumn.GUESS]
    used, first = reason == HintReason.USED, reason == HintReason.FIRST_STEP
    assert (used | first).all() and used.sum() > rows / 2 and first.any()
    assert (guess[used] == GuessSource.VALUE).all()
    assert set(guess[first].tolist()) <= {GuessSource.ROW_SAMPLE, GuessSource.NONE}
    hit = stats[:, StatsColumn.GUESS_HIT]
    assert set(hit.tolist()) <= {0, 1} and hit[used].float().mean() > 0.5
    assert (stats[:, StatsColumn.PASSES] >= 1).all() and (stats[:, StatsColumn.CANDIDATES] >= 0).all()
    assert (stats[:, StatsColumn.HITS] == -1).all() and (stats[:, StatsColumn.DONE] >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4000, 8192, 16_384, 32_768])
def test_statistics_of_a_causal_chunk_in_registers(width: int, dtype: torch.dtype) -> None:
    """Rows that registers hold are predicted from the row before as well, by its window of values."""
    rows, k = 4000, 512
    logits, starts, ends = chunk_of(rows, width)
    stats = assert_exact(logits.to(dtype), starts, ends, k, stats=True).stats
    assert stats is not None
    reason, hit = stats[:, StatsColumn.REASON], stats[:, StatsColumn.GUESS_HIT]
    used, first = reason == HintReason.USED, reason == HintReason.FIRST_STEP
    assert bool((used | first | (reason == HintReason.SHORT_ROW)).all()) and bool(first.any())
    assert bool((stats[used, StatsColumn.GUESS] == GuessSource.VALUE).all())
    assert bool((stats[first, StatsColumn.GUESS] == GuessSource.NONE).all())
    assert bool((hit[~used] == 0).all()) and bool((stats[used, StatsColumn.PASSES] == 1).all())
    if dtype != torch.bfloat16:  # its ties leave few windows
        assert int(used.sum()) > rows / 2 and float(hit[used].float().mean()) > 0.5


def test_counts_tell_where_to_look_behind_a_sample_that_missed() -> None:
    """Fours of nearly equal scores tell a sample, which reads fours, less than it takes for granted."""
    rows, n, k = 512, 40_000, 2048
    draw = torch.Generator(device="cuda").manual_seed(4)
    logits = torch.randn(rows, n // 4, device="cuda", generator=draw).repeat_interleave(4, dim=1)
    logits += 0.01 * torch.randn(rows, n, device="cuda", generator=draw)
    logits *= torch.rand(rows, 1, device="cuda", generator=draw).mul(4).exp2()  # No row predicts the next.
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    stats = assert_exact(logits, starts, starts + n, k, stats=True).stats
    again = (stats[:, StatsColumn.GUESS] == GuessSource.ROW_SAMPLE) & (stats[:, StatsColumn.PASSES] > 1)
    by_counts = again & (stats[:, StatsColumn.DONE] == 0)
    assert again.sum() > rows / 50 and by_counts.sum() > 0.8 * again.sum()


def test_statistics_of_short_windows() -> None:
    """A window of k scores is short, and one of k + 1 is not."""
    logits = rows_of_requests(300, 3000)
    lengths = integers(0, 1025, 300, seed=1)
    lengths[::5] = 1025
    lengths[1::5] = 1024
    starts = integers(0, 1000, 300, seed=2)
    stats = assert_exact(logits, starts, starts + lengths, 1024, stats=True).stats
    assert stats is not None
    short = stats[:, StatsColumn.REASON] == HintReason.SHORT_ROW
    assert torch.equal(short, lengths <= 1024)
    assert bool((stats[short, StatsColumn.HITS] == -1).all())


def test_statistics_of_rounds_alone() -> None:
    logits, starts, ends = chunk_of(300, 3000)
    stats = assert_exact(logits, starts, ends, 512, stats=True, path="radix_rounds").stats
    assert stats is not None
    assert bool((stats[:, StatsColumn.REASON] == HintReason.DISABLED).all())
    assert bool((stats[:, StatsColumn.GUESS] == GuessSource.NONE).all())


# ---------------------------------------------------------------- small enough for compute-sanitizer


@pytest.mark.sanitizer
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_chunks_with_every_argument(dtype: torch.dtype, path: str) -> None:
    rows, requests, k = 12, 3, 64
    for width in (65, 515, 4099):
        logits = place(rows_of_requests(rows, width).to(dtype), pad=3, shift=1)
        starts, ends = integers(-3, 9, rows, seed=1), integers(width // 2, width + 3, rows, seed=2)
        assert_exact(logits, starts, ends, k, path=path, stats=True)
        tables = {
            "offsets": integers(0, 99, requests, seed=3),
            "row_request": integers(-1, requests + 1, rows, seed=4),
            "page_table": integers(-1, 99, requests * 4, seed=5).view(requests, 4),
            "page_size": 64,
        }
        run_prefill(logits, starts, ends, k, slots=True, stats=True, path=path, **tables)
