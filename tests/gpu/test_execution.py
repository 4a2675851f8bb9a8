"""How the op behaves around the result: graphs, repetition, paging, statistics, compilation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contents import normal
from launches import captured, never_waiting, unobtrusive
from oracle import (
    PATHS,
    POISON,
    call,
    clone,
    columns,
    exact,
    full_lengths,
    new_state,
    new_stats,
    poisoned,
    run,
    words,
    wrong_rows,
)

import gvr_topk
from eval.stress.stress_cases import packed_spreads
from gvr_topk.constants import (
    STATE_MAX_ZSCORE,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    GuessSource,
    HintReason,
    StatsColumn,
)
from gvr_topk.contract import exact_topk
from gvr_topk.evaluation.paper_reference import DONE, topk_row
from gvr_topk.evaluation.synthetic import LayerGenerator
from gvr_topk.ops import launch
from gvr_topk.request_slots import PINNED_BUFFERS
from gvr_topk.state import TopkState
from tests.adversarial import adversarial_hints, adversarial_rows

K = 2048


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("next_n", "by_row"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("keep_indices", [False, True])
def test_graph_replay_with_changed_lengths_and_rows(
    path: str, next_n: int, by_row: bool, keep_indices: bool
) -> None:
    rows, width = 8, 120_000
    logits = normal(rows, width)
    lengths = torch.full((rows if by_row else rows // next_n,), width, dtype=torch.int32, device="cuda")
    state = new_state(rows, K, keep_indices=keep_indices)
    row_slot = (torch.arange(rows, device="cuda") // next_n).to(torch.int32)
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")

    def step() -> None:
        gvr_topk.indexer_topk_decode(
            logits, lengths, K, next_n=next_n, out=out, state=state, row_slot=row_slot, path=path
        )

    graph = captured(step)
    generator = torch.Generator().manual_seed(next_n)
    for turn in range(12):
        lengths.copy_(torch.randint(-2, width + 1, lengths.shape, dtype=torch.int32, generator=generator))
        if turn % 3 == 2:
            logits.copy_(normal(rows, width, seed=turn))
        owners = torch.randperm(rows // next_n, generator=generator).to(torch.int32)
        row_slot.copy_(owners.repeat_interleave(next_n))
        if turn == 6:
            state.reset()
        if turn == 9:
            state.reset([0, 2])
        out.fill_(POISON)
        graph.replay()
        assert wrong_rows(out, logits, lengths, K, next_n) == [], turn
        if state.indices is not None:
            assert torch.equal(state.indices[owners.to("cuda").long()], out[next_n - 1 :: next_n]), turn


def test_a_graph_keeps_the_state_of_a_layer() -> None:
    """One buffer for all layers, as integrations have: a graph writes the slots of its own layer alone."""
    slots = gvr_topk.RequestSlots(3, 4, K, max_rows=4, device="cuda")
    logits = normal(2, 70_000)
    lengths, out = full_lengths(logits), torch.empty(2, K, dtype=torch.int32, device="cuda")
    row_slot = slots.set_rows(["a", "b"])

    def step() -> None:
        gvr_topk.indexer_topk_decode(logits, lengths, K, out=out, state=slots.layer(1), row_slot=row_slot)

    graph = captured(step)
    assert slots.indices is not None
    for request_ids in (["b", "c"], ["d", "a"], ["e", "f"]):
        slots.set_rows(request_ids)
        logits.copy_(normal(2, 70_000, seed=ord(request_ids[0])))
        graph.replay()
        assert wrong_rows(out, logits, lengths, K) == []
        for row, request in enumerate(request_ids):
            assert torch.equal(slots.indices[1, slots.slot_of(request)], out[row])
    for layer in (0, 2):
        assert bool((slots.words[layer] == STATE_UNKNOWN).all())
        assert bool((slots.indices[layer] == -1).all())


def test_rows_that_move_faster_than_the_device_runs_arrive_in_order() -> None:
    slots = gvr_topk.RequestSlots(1, 9, None, max_rows=8, device="cuda")
    batches = [[(step + row) % 9 for row in range(8)] for step in range(5 * PINNED_BUFFERS)]
    seen = torch.empty(len(batches), 8, dtype=torch.int32, device="cuda")
    slots.set_rows(batches[0])
    slots.set_rows(batches[1])
    with never_waiting():
        torch.cuda._sleep(500_000_000)
        for step, batch in enumerate(batches):
            slots.set_rows(batch)
            seen[step].copy_(slots.row_slot)
            if step < PINNED_BUFFERS:  # later ones allocate, which may wait
                assert not torch.cuda.current_stream().query(), "the device did not lag behind"
    assert seen.tolist() == [[slots.slot_of(request) for request in batch] for batch in batches]


@pytest.mark.parametrize("path", PATHS)
def test_no_allocation_and_no_synchronization(path: str) -> None:
    logits, out = normal(4, 40_000), torch.empty(4, K, dtype=torch.int32, device="cuda")
    lengths = full_lengths(logits)
    gvr_topk.indexer_topk_decode(logits, lengths, K, out=out, path=path)
    with unobtrusive():
        gvr_topk.indexer_topk_decode(logits, lengths, K, out=out, path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["relu_zero_plateau", "zero_plateau_between", "few_distinct", "normal"])
def test_same_result_every_time_and_everywhere(path: str, name: str) -> None:
    n = 65_000
    row = torch.from_numpy(adversarial_rows(n, K, seed=4)[name]).to("cuda")
    wanted = exact_topk(row[None], full_lengths(row[None]), K)
    for batch in (1, 7, 40):
        logits = row.repeat(batch, 1)
        for _ in range(20 if batch == 1 else 3):
            got = run(logits, full_lengths(logits), K, path=path)
            assert torch.equal(got, wanted.expand(batch, K))
    for hint in adversarial_hints(n, K, seed=2).values():
        indices = torch.from_numpy(hint[:K]).to("cuda")[None].contiguous()
        state = TopkState.of(words(1, 0.4), indices, K)
        assert torch.equal(run(row[None], full_lengths(row[None]), K, path=path, state=state), wanted)


@pytest.mark.parametrize("layer", [1, 20])
@pytest.mark.parametrize("quantile", [False, True])
def test_statistics_are_the_reference_s(layer: int, quantile: bool) -> None:
    source = LayerGenerator(layer, 40_000, 5, seed=1)
    state = new_state(1, K, keep_indices=True)
    for step in range(5):
        scores = np.ascontiguousarray(source.scores(step))
        hint, alpha = state.indices[0].cpu().numpy(), float(state.words[0, 0])
        wanted = topk_row(scores, K, hint, guess="quantile" if quantile else "mean", alpha=alpha)
        logits = torch.from_numpy(scores).to("cuda")[None]
        stats, out = new_stats(1), poisoned(1, K)
        options = {"state": state, "stats": stats, "path": "paper_gvr", "quantile": quantile}
        launch(call(logits, full_lengths(logits), out, **options))
        assert np.array_equal(out[0].cpu().numpy(), wanted.indices)
        seen = dict(zip(StatsColumn, stats[0].tolist(), strict=True))
        assert seen[StatsColumn.PASSES] == wanted.stats.passes
        assert seen[StatsColumn.CANDIDATES] == wanted.stats.candidates
        assert seen[StatsColumn.SNAP] == wanted.stats.snap_iterations
        assert DONE[seen[StatsColumn.DONE]] == wanted.stats.done
        if step > 0:
            assert seen[StatsColumn.REASON] == HintReason.USED
            assert seen[StatsColumn.HITS] == wanted.stats.hit_count
            assert float(state.words[0, 0]) == pytest.approx(wanted.stats.alpha, abs=1e-6)


@pytest.mark.parametrize("width", [70_704, 600_000])
@pytest.mark.parametrize("keep_indices", [False, True])
def test_statistics_say_what_the_guess_was_worth(keep_indices: bool, width: int) -> None:
    """The first step starts from a sample of the row, the second from what the first has left."""
    logits, state = normal(3, width), new_state(3, K, keep_indices=keep_indices)
    stats = new_stats(3)
    expected = (
        (HintReason.FIRST_STEP, {GuessSource.ROW_SAMPLE}, 0),
        (HintReason.USED, {GuessSource.ZSCORE, GuessSource.VALUE}, K),
    )
    for reason, sources, hits in expected:
        got = run(logits, full_lengths(logits), K, state=state, stats=stats)
        seen = columns(stats)
        assert seen[StatsColumn.REASON] == [reason] * 3
        assert set(seen[StatsColumn.GUESS]) <= sources
        assert seen[StatsColumn.HITS] == [hits if keep_indices else -1] * 3
        assert seen[StatsColumn.GUESS_HIT] == [1] * 3
        assert wrong_rows(got, logits, full_lengths(logits), K) == []
        assert state.indices is None or torch.equal(got, state.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "rows"), [(2500, 3), (4096, 3), (8192, 3), (16_384, 3), (30_000, 134)])
def test_short_rows_are_found_around_the_last_value(width: int, rows: int, dtype: torch.dtype) -> None:
    base = normal(rows, width)
    lengths = full_lengths(base)
    state = new_state(rows, K)
    hits = 0
    for step in range(6):
        logits = (base + 0.1 * normal(rows, width).roll(step, 1)).to(dtype)
        stats, plainly = new_stats(rows), clone(state)
        plain = run(logits, lengths, K, state=plainly)
        got = exact(logits, lengths, K, state=state, stats=stats)
        assert torch.equal(plain, got)
        assert torch.equal(plainly.words, state.words), "statistics change what is left"
        seen = columns(stats)
        left = state.words[:, 0]
        # Of 16-bit scores more than a few may equal the k-th: then nothing is left.
        assert dtype != torch.float32 or bool((left < 0).all() and (left != STATE_UNKNOWN).all())
        settled = zip(seen[StatsColumn.GUESS_HIT], seen[StatsColumn.DONE], strict=True)
        assert not any(done for hit, done in settled if hit)
        if step > 0:
            hits += sum(seen[StatsColumn.GUESS_HIT])
            assert dtype != torch.float32 or set(seen[StatsColumn.GUESS]) == {GuessSource.VALUE}
    if dtype == torch.float32:
        assert hits == 5 * rows


@pytest.mark.parametrize("width", [70_704, 600_000])
def test_a_zscore_that_misses_or_finds_a_crowd_changes_only_the_time(width: int) -> None:
    """Z-scores far off, scores whose deviation says nothing, and what a quite different row has left."""
    logits = normal(3, width)
    logits[0, ::1000] *= 1e6
    lengths = full_lengths(logits)
    wanted = exact_topk(logits, lengths, K)
    usual, wide = (packed_spreads(*both, False) for both in ((0.05, 0.05), (1.0, 10.0)))
    for zscore in (-STATE_MAX_ZSCORE, -2.0, 0.0, 1.5, 2.2, 6.0, STATE_MAX_ZSCORE):
        for spreads, limit in ((0.0, 0.0), (usual, 0.1), (wide, 10.0), (usual, float("nan"))):
            left = words(3, STATE_ZSCORE_ORIGIN + zscore, limit=limit, spreads=spreads)
            state = TopkState.of(left, None, K)
            for _ in range(3):
                assert torch.equal(run(logits, lengths, K, state=state), wanted)
    flipped = -logits
    assert torch.equal(run(flipped, lengths, K, state=state), exact_topk(flipped, lengths, K))


@pytest.mark.parametrize("keep_indices", [False, True])
@pytest.mark.parametrize("width", [70_704, 600_000])
def test_only_the_value_is_left_where_the_deviation_drowns_in_the_mean(
    width: int, keep_indices: bool
) -> None:
    """Sums of squares of scores around 1000 leave nothing to reckon a z-score from."""
    logits = normal(3, width, seed=-width)
    logits[1:] += 1000.0
    lengths, state = full_lengths(logits), new_state(3, K, keep_indices=keep_indices)
    chosen = exact_topk(logits, lengths, K)
    kth = logits.gather(1, chosen.long()).amin(dim=1)
    for _ in range(3):
        assert torch.equal(run(logits, lengths, K, state=state), chosen)
    near, *far = state.words[:, 0].tolist()
    assert abs(near - STATE_ZSCORE_ORIGIN) <= STATE_MAX_ZSCORE
    assert far == [STATE_VALUE_ONLY] * 2
    assert torch.allclose(state.words[:, 1], kth, rtol=1e-5)


@pytest.mark.parametrize("pdl", [False, True])
def test_programmatic_launch_waits_for_the_scores(pdl: bool) -> None:
    logits = torch.zeros(4, 90_000, device="cuda")
    lengths, out = full_lengths(logits), torch.empty(4, K, dtype=torch.int32, device="cuda")
    for seed in range(10):
        fresh = normal(4, 90_000, seed=seed)
        logits.copy_(fresh)
        gvr_topk.indexer_topk_decode(logits, lengths, K, out=out, pdl=pdl)
        assert wrong_rows(out, fresh, lengths, K) == []


def test_compile_fullgraph_and_opcheck() -> None:
    logits = normal(2, 9000)
    lengths = full_lengths(logits)

    def step(scores: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return gvr_topk.indexer_topk_decode(scores * 2, lens, 512)

    assert torch.equal(
        torch.compile(step, fullgraph=True, backend="aot_eager")(logits, lengths), step(logits, lengths)
    )
    out = torch.empty(2, 512, dtype=torch.int32, device="cuda")
    counts = torch.empty(2, dtype=torch.int32, device="cuda")
    op = torch.ops.gvr_topk.indexer_topk_decode.default
    torch.library.opcheck(op, tuple(call(logits, lengths, out)))
    state = new_state(2, 512, keep_indices=True)
    torch.library.opcheck(op, tuple(call(logits, lengths, out, state=state, counts=counts)))
    usual = torch.ops.gvr_topk.indexer_topk_decode.usual
    torch.library.opcheck(usual, tuple(call(logits, lengths, out, state=state))[:9])


def test_compile_carries_the_state_from_step_to_step() -> None:
    logits, lengths = normal(2, 70_000), torch.tensor([70_000, 3000], dtype=torch.int32, device="cuda")
    state, eager = (new_state(2, K, keep_indices=True) for _ in range(2))

    def step(scores: torch.Tensor, lens: torch.Tensor, left: TopkState) -> torch.Tensor:
        return gvr_topk.indexer_topk_decode(scores * 2, lens, K, state=left)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(compiled(logits, lengths, state), step(logits, lengths, eager))
        assert torch.equal(state.indices, eager.indices)
    assert bool((state.words[0] != STATE_UNKNOWN).any())
