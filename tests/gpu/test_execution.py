"""How the op behaves around the result: graphs, streams, repetition, paging, statistics, compilation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import full_lengths, run, state, wrong_rows

import gvr_topk
from eval.common.stress_cases import packed_spreads
from gvr_topk.contract import GUESSES, PLACES, STATS_COLUMNS, VALUE_ONLY, exact_topk
from gvr_topk.evaluation.paper_reference import DONE, topk_row
from gvr_topk.evaluation.synthetic import LayerGenerator, adversarial_hints, adversarial_rows
from gvr_topk.ops import to_slots

PATHS = ("cluster", "radix", "gvr")
K = 2048


def normal(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, width, device="cuda", generator=generator)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("next_n", [1, 2])
def test_graph_replay_with_changed_lengths_and_rows(path: str, next_n: int) -> None:
    rows, width = 8, 120_000
    logits = normal(rows, width)
    lengths = torch.full((rows // next_n,), width, dtype=torch.int32, device="cuda")
    prior = torch.full((rows, K), -1, dtype=torch.int32, device="cuda")
    guess = state(rows)
    row_slot = (torch.arange(rows, device="cuda") // next_n).to(torch.int32)
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")

    def call() -> None:
        gvr_topk.indexer_topk_decode(
            logits,
            lengths,
            K,
            next_n=next_n,
            out=out,
            prior=prior,
            row_slot=row_slot,
            guess_state=guess,
            path=path,
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    generator = torch.Generator().manual_seed(next_n)
    for step in range(12):
        lengths.copy_(torch.randint(-2, width + 1, lengths.shape, dtype=torch.int32, generator=generator))
        if step % 3 == 2:
            logits.copy_(normal(rows, width, seed=step))
        row_slot.copy_(
            (torch.randperm(rows // next_n, generator=generator).to(torch.int32)).repeat_interleave(next_n)
        )
        out.fill_(-9)
        graph.replay()
        assert wrong_rows(out, logits, lengths, K, next_n) == [], step


@pytest.mark.parametrize("path", PATHS)
def test_no_allocation_and_no_synchronization(path: str) -> None:
    logits, out = normal(4, 40_000), torch.empty(4, K, dtype=torch.int32, device="cuda")
    lengths = full_lengths(logits)
    gvr_topk.indexer_topk_decode(logits, lengths, K, out=out, path=path)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        gvr_topk.indexer_topk_decode(logits, lengths, K, out=out, path=path)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_two_streams_do_not_disturb_each_other() -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    rows = [normal(16, 70_001 + 20_000 * i, seed=i) for i in range(2)]
    lengths = [full_lengths(r) for r in rows]
    outs = [torch.full((16, K), -9, dtype=torch.int32, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(25):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                gvr_topk.indexer_topk_decode(rows[i], lengths[i], K, out=outs[i], path=PATHS[i])
    torch.cuda.synchronize()
    for i in range(2):
        assert wrong_rows(outs[i], rows[i], lengths[i], K) == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["relu_zero_plateau", "zero_plateau_between", "few_distinct", "normal"])
def test_same_result_every_time_and_everywhere(path: str, name: str) -> None:
    n = 65_000
    row = torch.from_numpy(adversarial_rows(n, K, seed=4)[name]).to("cuda")
    want = run(row[None], full_lengths(row[None]), K, path="radix")
    for batch in (1, 7, 40):
        logits = row.repeat(batch, 1)
        for _ in range(20 if batch == 1 else 3):
            got = run(logits, full_lengths(logits), K, path=path)
            assert torch.equal(got, want.expand(batch, K))
    for hint in adversarial_hints(n, K, seed=2).values():
        prior = torch.from_numpy(hint[:K]).to("cuda")[None].contiguous()
        guess = state(1, 0.4)
        assert torch.equal(
            run(row[None], full_lengths(row[None]), K, path=path, prior=prior, guess_state=guess), want
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_size", [1, 32, 64, 100])
def test_page_table(path: str, page_size: int) -> None:
    rows, width, next_n = 4, 30_000, 2
    logits = normal(rows, width)
    lengths = torch.tensor([width, 1500], dtype=torch.int32, device="cuda")
    pages = torch.randperm(rows * width // page_size, device="cuda")[: 2 * (width // page_size)]
    table = pages.view(2, -1).to(torch.int32)
    prior = torch.full((2, K), -1, dtype=torch.int32, device="cuda")
    positions = run(logits, lengths, K, path=path, next_n=next_n)
    got = run(
        logits, lengths, K, path=path, next_n=next_n, prior=prior, page_table=table, page_size=page_size
    )
    assert torch.equal(got, to_slots(positions, table, page_size, next_n))
    assert torch.equal(prior, positions[next_n - 1 :: next_n])


@pytest.mark.parametrize("layer", [1, 20])
@pytest.mark.parametrize("quantile", [False, True])
def test_statistics_are_the_reference_s(layer: int, quantile: bool) -> None:
    source = LayerGenerator(layer, 40_000, 5, seed=1)
    prior = torch.full((1, K), -1, dtype=torch.int32, device="cuda")
    guess = state(1)
    for step in range(5):
        scores = np.ascontiguousarray(source.scores(step))
        hint, alpha = prior[0].cpu().numpy(), float(guess[0, 0])
        want = topk_row(scores, K, hint, guess="quantile" if quantile else "mean", alpha=alpha)
        logits = torch.from_numpy(scores).to("cuda")[None]
        stats = torch.zeros(1, len(STATS_COLUMNS), dtype=torch.int32, device="cuda")
        got = run(
            logits, full_lengths(logits), K, path="gvr", prior=prior, guess_state=guess, stats=stats,
            quantile_guess=quantile,
        )  # fmt: skip
        assert np.array_equal(got[0].cpu().numpy(), want.indices)
        seen = dict(zip(STATS_COLUMNS, stats[0].tolist(), strict=True))
        assert seen["passes"] == want.stats.passes
        assert seen["candidates"] == want.stats.candidates
        assert seen["snap"] == want.stats.snap_iterations
        assert DONE[seen["done"]] == want.stats.done
        if step > 0:
            assert seen["hits"] == want.stats.hit_count
            assert float(guess[0, 0]) == pytest.approx(want.stats.alpha, abs=1e-6)


@pytest.mark.parametrize("width", [70_704, 600_000])
@pytest.mark.parametrize("source", ["hint", "row sample"])
def test_cluster_statistics_say_what_the_guess_was_worth(source: str, width: int) -> None:
    """The first step starts from what it was given, the second from what the first has left."""
    logits, hinted = normal(3, width), source == "hint"
    prior = run(logits, full_lengths(logits), K).clone()
    if not hinted:
        prior.fill_(-1)
    guess = state(3, 1.0 if hinted else -1.0)
    stats = torch.zeros(3, len(STATS_COLUMNS), dtype=torch.int32, device="cuda")
    for step, first in enumerate(({source}, {"place", "value"})):
        got = run(
            logits, full_lengths(logits), K, prior=prior, guess_state=guess, stats=stats, path="cluster"
        )
        columns = dict(zip(STATS_COLUMNS, stats.T.tolist(), strict=True))
        assert columns["path"] == [3] * 3
        assert {GUESSES[source] for source in columns["guess"]} <= first
        assert columns["hits"] == [K if step == 1 or hinted else 0] * 3
        assert columns["guess_hit"] == [1] * 3
        assert wrong_rows(got, logits, full_lengths(logits), K) == []
        assert torch.equal(got, prior)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "rows"), [(2500, 3), (4096, 3), (8192, 3), (16_384, 3), (30_000, 134)])
def test_short_rows_are_found_around_the_last_value(width: int, rows: int, dtype: torch.dtype) -> None:
    base = normal(rows, width)
    lengths = full_lengths(base)
    prior = torch.full((rows, K), -1, dtype=torch.int32, device="cuda")
    guess = state(rows)
    hits = 0
    for step in range(6):
        logits = (base + 0.1 * normal(rows, width).roll(step, 1)).to(dtype)
        stats = torch.zeros(rows, len(STATS_COLUMNS), dtype=torch.int32, device="cuda")
        left = guess.clone()
        plain = run(logits, lengths, K, prior=prior.clone(), guess_state=left)
        got = run(logits, lengths, K, prior=prior, guess_state=guess, stats=stats)
        assert wrong_rows(got, logits, lengths, K) == []
        assert torch.equal(plain, got)
        assert torch.equal(left, guess), "statistics change what is left"
        columns = dict(zip(STATS_COLUMNS, stats.T.tolist(), strict=True))
        # Of 16-bit scores more than a few may equal the k-th: then nothing is left.
        assert dtype != torch.float32 or bool((guess[:, 0] < 0).all() and (guess[:, 0] != -1).all())
        assert not any(done for hit, done in zip(columns["guess_hit"], columns["done"], strict=True) if hit)
        if step > 0:
            hits += sum(columns["guess_hit"])
            assert dtype != torch.float32 or {GUESSES[g] for g in columns["guess"]} == {"value"}
    if dtype == torch.float32:
        assert hits == 5 * rows


@pytest.mark.parametrize("width", [70_704, 600_000])
def test_a_place_that_misses_or_finds_a_crowd_changes_only_the_time(width: int) -> None:
    """Places far off, scores whose deviation says nothing, and what a row left for a quite different one."""
    logits = normal(3, width)
    logits[0, ::1000] *= 1e6
    lengths = full_lengths(logits)
    want = run(logits, lengths, K)
    prior = want.clone()
    usual, wide = (packed_spreads(*both, False) for both in ((0.05, 0.05), (1.0, 10.0)))
    for left in (48.0, 62.0, 64.0, 65.5, 66.2, 70.0, 80.0):
        for spreads, limit in ((0.0, 0.0), (usual, 0.1), (wide, 10.0), (usual, float("nan"))):
            guess = state(3, left, limit=limit, spreads=spreads)
            for _ in range(3):
                assert torch.equal(run(logits, lengths, K, prior=prior, guess_state=guess), want)
    flipped = -logits
    assert torch.equal(run(flipped, lengths, K, prior=prior, guess_state=guess), run(flipped, lengths, K))


@pytest.mark.parametrize("with_prior", [False, True])
@pytest.mark.parametrize("width", [70_704, 600_000])
def test_only_the_value_is_left_where_the_deviation_drowns_in_the_mean(width: int, with_prior: bool) -> None:
    """Sums of squares of scores around 1000 leave nothing to reckon a place from."""
    logits = normal(3, width)
    logits[1:] += 1000.0
    lengths, guess = full_lengths(logits), state(3)
    prior = torch.full((3, K), -1, dtype=torch.int32, device="cuda") if with_prior else None
    chosen = exact_topk(logits, lengths, K)
    kth = logits.gather(1, chosen.long()).amin(dim=1)
    for _ in range(3):
        got = run(logits, lengths, K, path="cluster", prior=prior, guess_state=guess)
        assert torch.equal(got, chosen)
    near, *far = guess[:, 0].tolist()
    assert PLACES[0] <= near <= PLACES[1]
    assert far == [VALUE_ONLY] * 2
    assert torch.allclose(guess[:, 1], kth, rtol=1e-5)


@pytest.mark.parametrize("pdl", [False, True])
def test_programmatic_launch_waits_for_the_scores(pdl: bool) -> None:
    logits = torch.zeros(4, 90_000, device="cuda")
    lengths, out = full_lengths(logits), torch.empty(4, K, dtype=torch.int32, device="cuda")
    for seed in range(10):
        fresh = normal(4, 90_000, seed)
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
    torch.library.opcheck(
        torch.ops.gvr_topk.indexer_topk_decode,
        (logits, lengths, out, None, None, None, None, None, None, 512),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k: want 1 to"),
        ({"next_n": 3}, "multiple of next_n"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens: want"),
        ({"logits": torch.zeros(2, 64, dtype=torch.float64)}, "logits: want dtype"),
        ({"indices": torch.zeros(2, 3, dtype=torch.int32)}, "out: want"),
        ({"prior": torch.zeros(2, 5, dtype=torch.int32)}, "prior: want"),
        ({"page_table": torch.zeros(2, 4, dtype=torch.int32)}, "page_size: want at least 1"),
        ({"path": 9}, "path: want"),
        ({"ctas_per_row": 3}, "ctas_per_row: want"),
    ],
)
def test_the_compiled_op_refuses_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "logits": torch.zeros(2, 64), "seq_lens": torch.full((2,), 64, dtype=torch.int32),
        "indices": torch.zeros(2, 8, dtype=torch.int32), "prior": None, "row_slot": None, "guess_state": None,
        "stats": None, "page_table": None, "phase_clocks": None, "k": 8,
    }  # fmt: skip
    arguments |= change
    on_gpu = {n: v.to("cuda") if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.gvr_topk.indexer_topk_decode(**on_gpu)
    torch.cuda.synchronize()  # the context is still good
