"""Rows much shorter than their buffer, as CUDA graphs that are captured for the longest row have them.

The first CTA of a cluster selects from those alone that one CTA holds; the others share a row whatever its
buffer. Lengths lie around every bound between the two, and grow and shrink across them from step to step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contents import int32, normal
from launches import captured
from oracle import (
    POISON,
    call,
    exact,
    new_state,
    new_stats,
    plan_here,
    poisoned,
    run,
    words,
    wrong_dropped_rows,
    wrong_rows,
)
from torch import Tensor

from gvr_topk.constants import STATE_UNKNOWN, GuessSource, HintReason, StatsColumn
from gvr_topk.contract import DTYPES
from gvr_topk.cpu import to_slots
from gvr_topk.ops import launch
from gvr_topk.policy import Plan
from gvr_topk.state import TopkState
from tests.adversarial import adversarial_rows

K = 2048
RESIDENT_LIMIT = 8192  # where the cluster's registers hold the buffer
LIMIT = 16_384  # where it streams
"""Longest row that the first CTA selects from alone."""
WIDTHS = (32_769, 131_072, 163_848, 1 << 20)
"""The first of rows off alignment, the third of warps that hold unequal parts."""
LENGTHS = (
    K, K + 1, 4096, 8191, 8192, 8193, LIMIT - 1, LIMIT, LIMIT + 1, 16_390, 20_000, 32_768,
)  # fmt: skip


def hide_ends(logits: Tensor, lengths: Tensor) -> Tensor:
    """What lies behind each row's end becomes NaN, which a kernel that counts it would rank first."""
    position = torch.arange(logits.shape[1], device="cuda")
    return logits.masked_fill(position >= lengths[:, None], torch.nan)


def lengths_for(rows: int, step: int) -> Tensor:
    """A length for each row; another step takes others of them."""
    return int32(*[LENGTHS[(row + step) % len(LENGTHS)] for row in range(rows)])


def longest_solo_row(made: Plan) -> int:
    return {"resident": RESIDENT_LIMIT, "streaming": LIMIT}[made.family]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("width", WIDTHS)
def test_lengths_that_change_from_step_to_step(width: int, rows: int, dtype: torch.dtype) -> None:
    state = new_state(rows + 3, K, keep_indices=True)
    assert state.indices is not None
    slots = (torch.arange(rows, device="cuda") + 3).flip(0).to(torch.int32)
    logits = normal(rows, width, dtype)
    for step in range(len(LENGTHS) if rows == 1 else 5):
        lengths = lengths_for(rows, step)
        shown = hide_ends(logits + 0.01 * normal(rows, width, dtype, seed=step), lengths)
        counts = poisoned(rows)
        got = exact(shown, lengths, K, state=state, row_slot=slots, counts=counts, said=step)
        assert torch.equal(counts, lengths.clamp(max=K))
        assert torch.equal(state.indices[slots.long()], got)


@pytest.mark.parametrize("path", ["auto", "no_hint"])
@pytest.mark.parametrize("k", [1, 7, 512, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_k(width: int, k: int, path: str) -> None:
    lengths = int32(k, k + 1, 4096, LIMIT, LIMIT + 1, width, 0, -3)
    logits = hide_ends(normal(8, width), lengths)
    state = new_state(8, k)
    for _ in range(3):
        exact(logits, lengths, k, path=path, state=state)
    exact(logits, lengths, k, path=path)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("ctas", [2, 4, 8, 16])
def test_forced_clusters(ctas: int, rows: int) -> None:
    """Parts of the first CTA that end before the row, at its end and behind it."""
    for width in (16_388, 40_000, 65_536, 131_072, 262_144, 262_148):
        lengths = lengths_for(rows, ctas).clamp(max=width)
        logits = hide_ends(normal(rows, width), lengths)
        state = new_state(rows, K)
        for _ in range(2):
            exact(logits, lengths, K, ctas=ctas, state=state, said=width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [131_072, 1 << 20])
@pytest.mark.parametrize("length", [3000, 8192, LIMIT])
def test_hard_rows(length: int, width: int, dtype: torch.dtype) -> None:
    kinds = adversarial_rows(length, K, seed=length)
    logits = torch.full((len(kinds), width), torch.nan, device="cuda", dtype=dtype)
    for row, scores in enumerate(kinds.values()):
        logits[row, :length] = torch.from_numpy(scores).to("cuda").to(dtype)
    lengths = int32(*[length] * len(kinds))
    state = new_state(len(kinds), K)
    for _ in range(3):
        exact(logits, lengths, K, state=state)


@pytest.mark.parametrize("fill", [-torch.inf, torch.inf, torch.nan, 0.0])
@pytest.mark.parametrize("share", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("width", [131_072, 1 << 20])
def test_masked_rows(width: int, share: float, fill: float) -> None:
    lengths = lengths_for(12, 0)
    logits = normal(12, width)
    draw = torch.Generator(device="cuda").manual_seed(1)
    logits = logits.masked_fill(torch.rand(logits.shape, device="cuda", generator=draw) < share, fill)
    logits = hide_ends(logits, lengths)
    state, dropping = new_state(12, K), new_state(12, K)
    for _ in range(3):
        got = exact(logits, lengths, K, state=state)
        counts = poisoned(12)
        got = run(logits, lengths, K, state=dropping, drop_masked=True, counts=counts)
        assert wrong_dropped_rows(got, logits, lengths, K) == []
        assert torch.equal(counts, (got >= 0).sum(dim=1).to(torch.int32))


@pytest.mark.parametrize("width", [131_072, 1 << 20])
def test_pages_drafts_and_shared_slots(width: int) -> None:
    """Two rows to a request, slots that several requests name, and positions beside cache slots."""
    requests, next_n, page_size = 8, 2, 64
    rows = requests * next_n
    lengths = int32(K + 1, K + 2, 4096, 8193, LIMIT, LIMIT + 1, LIMIT + 2, 40_000)
    logits = normal(rows, width)
    draw = torch.Generator(device="cuda").manual_seed(2)
    shape = (requests, width // page_size)
    table = torch.randint(0, 1 << 20, shape, dtype=torch.int32, device="cuda", generator=draw)
    row_slot = int32(0, 0, 1, 1, 1, 1, 2, 2, -1, -1, 3, 3, 3, 3, 0, 0)
    state = new_state(4, K, keep_indices=True)
    assert state.indices is not None
    for _ in range(3):
        slots = poisoned(rows, K)
        stats = new_stats(rows)
        paged = {"page_table": table, "page_size": page_size, "slots": slots}
        got = exact(logits, lengths, K, next_n=next_n, state=state, row_slot=row_slot, stats=stats, **paged)
        wanted = to_slots(got.cpu(), table.cpu(), page_size, next_n)
        assert torch.equal(slots.cpu(), wanted)
        assert torch.equal(state.indices, got[[15, 5, 7, 13]])
        assert stats[8:10, StatsColumn.REASON].tolist() == [HintReason.NO_SLOT] * 2


@pytest.mark.parametrize("keep_indices", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64, 128])
@pytest.mark.parametrize("width", [131_072, 1 << 20])
def test_graph_replay_with_changed_lengths(width: int, rows: int, keep_indices: bool) -> None:
    if rows * width > 1 << 26:
        pytest.skip("such rows are in the other tests")
    logits, scores = normal(rows, width), normal(rows, width, seed=1)
    lengths = lengths_for(rows, 0)
    state = new_state(rows, K, keep_indices=keep_indices)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    arguments = call(logits, lengths, out, state=state, row_slot=slots)
    graph = captured(lambda: launch(arguments))
    for step in range(14):
        lengths.copy_(lengths_for(rows, step) if step != 9 else int32(*[width] * rows))
        logits.copy_(hide_ends(scores + 0.01 * step, lengths))
        out.fill_(POISON)
        graph.replay()
        assert wrong_rows(out, logits, lengths, K) == [], step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [2500, RESIDENT_LIMIT, LIMIT])
@pytest.mark.parametrize(("width", "rows"), [(131_072, 1), (131_072, 8), (1 << 20, 1), (1 << 20, 64)])
def test_statistics_and_states_are_those_of_a_short_row(
    width: int, rows: int, length: int, dtype: torch.dtype
) -> None:
    """The window is exact arithmetic: a buffer as long as a short row leaves the same, bit for bit."""
    made = plan_here(rows, width, K, dtype)
    if length > longest_solo_row(made):
        pytest.skip("such a row is shared by the cluster, which predicts by other numbers")
    values = 16 if length <= RESIDENT_LIMIT else 32
    narrow = 512 * values
    short = plan_here(rows, narrow, K, dtype)
    assert (short.family, short.values_per_thread) == ("small_row", values)
    left, base = words(rows), normal(rows, width, dtype)
    alone = left.clone()
    lengths, used = int32(*[length] * rows), 0
    for step in range(5):
        logits = hide_ends(base + 0.02 * normal(rows, width, dtype, seed=step), lengths)
        stats, stats_alone = new_stats(rows), new_stats(rows)
        got = run(logits, lengths, K, state=TopkState.of(left, None, K), stats=stats)
        same = logits[:, :narrow].contiguous()
        run(same, lengths, K, state=TopkState.of(alone, None, K), stats=stats_alone)
        assert wrong_rows(got, logits, lengths, K) == []
        assert torch.equal(stats, stats_alone)
        assert torch.equal(left.view(torch.int32), alone.view(torch.int32))
        used += int(stats[:, StatsColumn.GUESS_HIT].sum())
    assert used > 0 or dtype != torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("width", [40_960, 131_072, 1 << 20])
def test_rows_that_grow_past_the_limit_stay_predicted(width: int, rows: int, dtype: torch.dtype) -> None:
    """The first step that the cluster shares goes by the window that the last short one has left."""
    base, left = normal(rows, width, dtype), words(rows)
    limit = longest_solo_row(plan_here(rows, width, K, dtype))
    for step in range(12):
        length = limit - 6 + step
        lengths = int32(*[length] * rows)
        logits = hide_ends(base + 0.01 * normal(rows, width, dtype, seed=1 + step), lengths)
        before, stats = left.clone(), new_stats(rows)
        exact(logits, lengths, K, state=TopkState.of(left, None, K), stats=stats, said=length)
        windows = (before[:, 0] < 0) & (before[:, 0] != STATE_UNKNOWN)
        if length == limit + 1:  # 16-bit rows may leave no window, where many scores equal the k-th
            assert bool(windows.all()) or dtype != torch.float32
            seen = stats[windows]
            assert bool((seen[:, StatsColumn.REASON] == HintReason.USED).all())
            assert bool((seen[:, StatsColumn.GUESS] == GuessSource.VALUE).all())
            hits = int(seen[:, StatsColumn.GUESS_HIT].sum())
            assert hits >= 0.9 * len(seen) or dtype != torch.float32


def test_lengths_that_another_stream_rewrites() -> None:
    """CTAs of a cluster may read different lengths: the launch ends, and writes its own results alone."""
    rows, width = 8, 131_072
    logits = normal(rows, width)
    lengths = int32(*[LIMIT] * rows)
    choices = [int32(*[n] * rows) for n in (LIMIT, 60_000, 100, LIMIT + 1, width, 4096)]
    guarded = poisoned(rows, K + 8)
    out: Any = guarded[:, :K]
    state = new_state(rows, K)
    arguments = call(logits, lengths, out, state=state)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(300):
        with torch.cuda.stream(other):
            for chosen in choices:
                lengths.copy_(chosen)
        launch(arguments)
        launch(arguments)
    torch.cuda.synchronize()
    assert bool((guarded[:, K:] == POISON).all())
    launch(arguments)
    assert wrong_rows(out, logits, lengths, K) == []
