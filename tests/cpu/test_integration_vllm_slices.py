"""Scores of long prompts in slices, on a fake of vLLM 0.33: what is computed, when, and how it fails."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_engine import CHUNK, Runner
from vllm_lines import assert_prompts_exact, calls, prefill_op, register_with

from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations.vllm import plugin, prefill, slices
from gvr_topk.integrations.vllm.slices import DeferredScores, full_chunks

KEYS, ROWS = 300, 2
BUDGET = 4 * KEYS * ROWS
"""Bytes of the scores of two rows of the longest prompt."""

STOCK, WHOLE, SLICED = "original", ("gvr_topk", "prefill"), ("gvr_topk", "prefill slices")


@pytest.fixture(autouse=True)
def small(serving, monkeypatch):
    """Slices and chunks."""
    monkeypatch.setattr(slices, "ALIGNMENT", 16)
    monkeypatch.setattr(slices, "ROWS_PER_MULTIPROCESSOR", 2)
    monkeypatch.setattr(slices, "multiprocessors", lambda device: 2)


@pytest.fixture
def scored(monkeypatch):
    """Shapes of the scores that vLLM's scorer has made."""
    from vllm.utils import deep_gemm as module  # before the indexer takes it from there

    shapes, original = [], module.fp8_fp4_mqa_logits

    def score(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
        scores = original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k)
        shapes.append(tuple(scores.shape))
        return scores

    monkeypatch.setattr(module, "fp8_fp4_mqa_logits", score)
    return shapes


def warmed(**options) -> Runner:
    """A runner whose layers have scored a prompt."""
    runner = Runner(logits_bytes=BUDGET, **options)
    first = runner.add("first", CHUNK)
    assert_prompts_exact(runner.step([], [first]), runner.topk)
    runner.finish(first)
    return runner


@pytest.mark.parametrize("via_op", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_long_prompts_are_exact_in_slices(scored, log, via_op, inference):
    """The rows of a chunk are as many as fill the GPU, and no scores take more than the budget."""
    with torch.inference_mode(inference):
        runner = warmed(via_op=via_op)
        before, shapes = calls(), len(scored)
        assert before == {WHOLE: 2}
        step = runner.step([], [runner.add("long", KEYS), runner.add("short", 40)])
    assert_prompts_exact(step, runner.topk)
    # Nine rows, four at once, of which the last one fits the budget; and the short prompt.
    assert calls() == before | {SLICED: 2 * 2, WHOLE: 2 + 2 + 2}
    rows = [shape[0] for shape in scored[shapes:]]
    assert set(rows) == {CHUNK, 4, 1} and rows.count(CHUNK) == 2
    assert all(4 * rows * width <= BUDGET for rows, width in scored[shapes:])
    assert sum(width for rows, width in scored[shapes:] if rows == 4) == 2 * 2 * KEYS
    assert sum(line.endswith("on: prefill slices of long prompts") for line in log) == 1
    assert not [line for line in log if "fell back" in line]


def test_with_fewer_heads_more_rows_fill_the_gpu(scored):
    runner = warmed(index_n_heads=16)
    shapes = len(scored)
    assert_prompts_exact(runner.step([], [runner.add("long", KEYS)]), runner.topk)
    assert {rows for rows, _ in scored[shapes:]} == {9} and calls()[SLICED] == 2


def test_ranks_that_share_the_rows_score_theirs_in_slices(scored, monkeypatch):
    """Their shares begin and end within chunks, and each row is one rank's."""
    from vllm.model_executor.layers import sparse_attn_indexer as module

    chosen = []
    for rank in range(3):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        runner = Runner(logits_bytes=BUDGET, tp=3)
        first = runner.add("first", CHUNK)
        runner.step([], [first])
        runner.finish(first)
        before, shapes = calls(), len(scored)
        step = runner.step([], [runner.add("one", KEYS), runner.add("other", KEYS)])
        assert calls().get(SLICED, 0) == before.get(SLICED, 0) + 2
        assert all(4 * rows * width <= BUDGET for rows, width in scored[shapes:])
        chosen.append(step.prompts.chosen)
    step.prompts.chosen = {name: torch.stack([own[name] for own in chosen]).amax(0) for name in runner.names}
    assert_prompts_exact(step, runner.topk)
    for name in runner.names:
        assert [int((own[name][:, 0] >= 0).sum()) for own in chosen] == [6, 6, 6]


@pytest.mark.parametrize(
    "options",
    [
        *({"dcp": 2}, {"pcp": True}, {"candidate_block_size": 8}, {"arch": 120}, {"microbatches": True}),
        {"backend": "persistent"},
    ],
)
def test_other_chunks_stay(scored, log, monkeypatch, options):
    """Ranks, CTAs or microbatches share the work, blocks are chosen first, or another top-k was chosen."""
    options = dict(options)
    arch = options.pop("arch", 90)
    monkeypatch.setattr(slices, "arch_of", lambda device: arch)
    ours = "backend" not in options
    runner = Runner(logits_bytes=BUDGET, **options)
    for _ in range(2):
        step = runner.step([], [runner.add("long", KEYS)])
        assert_prompts_exact(step, runner.topk, ours)
    assert SLICED not in calls()
    assert all(rows <= ROWS for rows, _ in scored)
    assert any("not in use: prefill slices: " in line for line in log) is ours


def test_a_builder_of_another_kind_keeps_its_chunks(scored, log):
    """One line says so, once; and a splitter that is called outside of a build does what it did."""
    runner = warmed()
    chunks = runner.builder._split_indexer_prefill_chunks(
        torch.tensor([KEYS]), torch.tensor([CHUNK]), 1, BUDGET
    )
    assert [part.stop - part.start for _, part in chunks] == [2, 2, 2, 2, 1]
    del runner.builder.dcp_world_size
    for _ in range(2):
        assert_prompts_exact(runner.step([], [runner.add("long", KEYS)]), runner.topk)
        runner.builder.dcp_world_size = 1
    assert SLICED not in calls() and max(rows for rows, width in scored if width == KEYS) == ROWS
    said = [line for line in log if "prompts are not scored in slices: AttributeError" in line]
    assert len(said) == 1


def test_chunks_stay_where_slices_are_off(scored, monkeypatch):
    register_with(monkeypatch, GVR_TOPK_VLLM_SLICES="0")
    runner = warmed()
    assert_prompts_exact(runner.step([], [runner.add("long", KEYS)]), runner.topk)
    assert set(calls()) == {WHOLE}


def test_layers_that_score_elsewhere_keep_their_chunks(scored, log):
    """A layer of the builder that has never called the scorer may have another one."""
    runner = warmed()
    assert not [line for line in log if "not in use" in line]
    runner.builder.layer_names = [*runner.names, "model.layers.9.self_attn.indexer.k_cache"]
    assert_prompts_exact(runner.step([], [runner.add("long", KEYS)]), runner.topk)
    assert SLICED not in calls() and max(rows for rows, width in scored if width == KEYS) == ROWS
    assert log[-1].endswith("slices: model.layers.9.self_attn.indexer.k_cache has not scored a prompt")


def test_layers_that_select_elsewhere_keep_their_chunks(scored):
    """Their scores come from the scorer that is wrapped, and go to another top-k."""
    runner = Runner(logits_bytes=BUDGET)
    hook = plugin._integration.hook.slices
    for name in runner.names:
        hook._layer = lambda name=name: name
        from vllm.model_executor.layers import sparse_attn_indexer as module

        scores = torch.zeros(1, 3)
        ends = torch.tensor([3], dtype=torch.int32)
        module.fp8_fp4_mqa_logits((scores, None), (scores.T, scores), scores, ends * 0, ends, 3)
    hook._layer = lambda: None
    assert_prompts_exact(runner.step([], [runner.add("long", KEYS)]), runner.topk)
    assert SLICED not in calls() and max(rows for rows, _ in scored) == ROWS


@pytest.mark.parametrize("budget", [0, 4, 4 * 16 * 4])
def test_the_least_budgets(scored, budget):
    """Of which the first does not hold a row, nor a key of each."""
    runner = Runner(logits_bytes=budget)
    for _ in range(2):
        assert_prompts_exact(runner.step([], [runner.add("long", KEYS)]), runner.topk)
    assert max(rows * width for rows, width in scored) <= max(4 * 16, KEYS)
    assert calls()[SLICED] == 2 * 2


def test_chunks_of_an_unknown_kind_are_left_alone(log, monkeypatch):
    """The server goes on, and one line says why."""
    runner = warmed()
    monkeypatch.setattr(slices, "full_chunks", lambda chunks, rows: chunks[0].rows)
    assert_prompts_exact(runner.step([], [runner.add("long", KEYS)]), runner.topk)
    assert log[-1].endswith(
        "prompts are not scored in slices: AttributeError: 'tuple' object has no attribute 'rows'"
    )
    assert SLICED not in calls()


def test_an_error_leaves_the_chunk_to_vllm(scored, log, monkeypatch):
    """Also half way: vLLM's own top-k then selects, as many rows at once as the budget holds."""
    runner = warmed()
    done, shapes = dict(calls()), len(scored)
    original = prefill.indexer_topk_prefill

    def fail_later(*args, **kwargs):
        if kwargs["column"] > 0:
            raise RuntimeError("no room")
        return original(*args, **kwargs)

    monkeypatch.setattr(prefill, "indexer_topk_prefill", fail_later)
    request = runner.add("long", KEYS)
    assert_prompts_exact(runner.step([], [request]), runner.topk, ours=False)
    assert calls() == done | {(STOCK, "prefill error: RuntimeError"): 2 * 3}
    assert all(4 * rows * width <= BUDGET for rows, width in scored[shapes:])
    assert len([line for line in log if "fell back: prefill: RuntimeError: no room" in line]) == 1
    monkeypatch.setattr(prefill, "indexer_topk_prefill", original)
    shapes = len(scored)
    assert_prompts_exact(runner.step([], [request]), runner.topk, ours=False)
    assert {rows for rows, _ in scored[shapes:]} == {1, ROWS}  # vLLM's own chunks of nine rows


def test_the_first_slices_are_verified(log, monkeypatch):
    """And a chunk whose selection is wrong is noticed."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="2")
    runner = warmed(specials=False)
    request = runner.add("long", KEYS)
    assert_prompts_exact(runner.step([], [request]), runner.topk)
    assert [line for line in log if line.endswith("verified 2 calls of prefill top-k slices")]
    assert calls()[SLICED] == 2 * 2
    monkeypatch.setattr(DeferredScores, "slices", lambda self: iter([(0, -self[:])]))
    register_with(monkeypatch)
    runner = warmed(specials=False)
    step = runner.step([], [runner.add("long", KEYS)])
    assert_prompts_exact(step, runner.topk, ours=False)
    (line,) = [line for line in log if "fell back" in line]
    assert "Differs: row 0 of 4: selected score" in line and "prefill" in line


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=5), st.integers(1, 20)
)
def test_full_chunks_hold_every_row_once(requests, fill):
    """In order, of the same requests, and the GPU is filled no more often than it takes."""
    chunks = [
        (slice(number, number + 1), slice(at, min(at + step, rows)))
        for number, (rows, step) in enumerate(requests)
        for at in range(0, rows, step)
    ]
    full = full_chunks(chunks, fill)
    for number, (rows, step) in enumerate(requests):
        own = [part for whole, part in full if whole == slice(number, number + 1)]
        assert [row for part in own for row in range(part.start, part.stop)] == list(range(rows))
        sizes = [part.stop - part.start for part in own]
        assert sum(-(-size // fill) for size in sizes) == -(-rows // fill)
        assert max(sizes) <= max(step, fill)
        if step % fill == 0 or step >= rows:
            assert sizes == [min(step, rows - at) for at in range(0, rows, step)]
    assert [whole.start for whole, _ in full] == sorted(whole.start for whole, _ in full)


def deferred_call(rows, k, seed, budget=640, before=lambda: None):
    """Arguments of the op with deferred scores, which call `before` first, and what the op has to write."""
    logits = torch.randn(rows, KEYS, generator=torch.Generator().manual_seed(seed))
    scales, starts = torch.arange(rows), torch.zeros(rows, dtype=torch.int32)
    ends = torch.linspace(1, KEYS, rows).to(torch.int32)
    made = []

    def score(q, kv, weights, starts, ends, columns):
        assert torch.equal(q[0][:, 0], logits[q[1], 0]) and len(weights) == len(q[1])
        assert all(one() is None for one in made), "scores are kept while others are computed"
        before()
        part = torch.full((len(weights), columns), 7e33)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            part[row, : end - start] = q[0][row, start:end]
        made.append(weakref.ref(part))
        return part

    deferred = DeferredScores(
        score, (logits, scales), (logits, logits), torch.ones(rows, 1), starts, ends, KEYS, budget
    )
    out = torch.full((rows, k + 1), 7, dtype=torch.int32)
    call = (deferred, starts, ends, out[:, :k], rows, *deferred.stride(), k)
    return call, out, torch.cat([sorted_topk(logits, ends, k), out[:, k:]], 1)


def test_one_carry_serves_all_calls_of_a_thread():
    """Of any number of rows and any k, in inference mode and outside; and scores are dropped one by one."""
    op = prefill_op()
    shapes = [(3, 8), (5, 8), (5, 16), (2, 8), (40, 24), (5, 16)]
    for number, (rows, k) in enumerate(shapes):
        call, out, wanted = deferred_call(rows, k, number)
        with torch.inference_mode(number % 2 == 0):
            op(*call)
        assert torch.equal(out, wanted)
    assert calls() == {SLICED: len(shapes)}


def test_threads_have_carries_of_their_own():
    """As where vLLM works on two halves of a batch at once."""
    op = prefill_op()
    others = []

    def call_in_a_thread():
        if len(others) == 1:  # between two slices
            call, out, wanted = deferred_call(5, 16, 1)
            thread = threading.Thread(target=op, args=call)
            thread.start()
            thread.join()
            assert torch.equal(out, wanted)
        others.append(None)

    call, out, wanted = deferred_call(5, 16, 0, before=call_in_a_thread)
    op(*call)
    assert torch.equal(out, wanted) and len(others) == 3
    assert calls() == {SLICED: 2}


def test_captured_calls_are_vllms(monkeypatch):
    """A carry that is made in a capture would be one of the graph."""
    op = prefill_op()
    monkeypatch.setattr(prefill, "capturing", lambda device: True)
    for _ in range(2):
        call, out, wanted = deferred_call(5, 16, 0)
        op(*call)
        assert torch.equal(out.sort(1).values, wanted.sort(1).values)
    assert calls() == {(STOCK, "prefill captured"): 2}


@pytest.mark.parametrize("budget", [1, 100, 640, 2500, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_scores_are_the_scores(budget, dtype):
    """By rows and by slices, each within the budget if that holds a row, or a tile of keys."""
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    rows, keys = 5, 203
    starts = torch.tensor([0, 7, 7, 300, 490], dtype=torch.int32)
    ends = torch.tensor([203, 7, 100, 503, 500], dtype=torch.int32)
    scores = torch.randn(rows, 503)
    call = ((scores, None), (scores.new_empty(503, 1), scores.new_empty(503)), scores.new_ones(rows, 1))

    def score(*given):
        return fp8_fp4_mqa_logits(*given).to(dtype)

    deferred = DeferredScores(score, *call, starts, ends, keys, budget)
    assert deferred.shape == (rows, keys) and deferred.dim() == 2 and deferred.dtype == torch.float32
    assert deferred.stride() == (keys, 1) and deferred.stride(0) == keys and deferred.stride(1) == 1
    seen = torch.full((rows, keys), torch.nan)
    columns = 0
    for column, part in deferred.slices():
        assert column == columns and part.numel() <= max(budget, 16 * rows) and part.dtype == dtype
        assert column % 16 == 0
        columns += part.shape[1]
        seen[:, column:columns] = part
    assert columns == keys
    parts = list(deferred.parts())
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    by_rows = torch.cat([deferred[part] for part in parts])
    assert by_rows.dtype == torch.float32
    assert all(deferred[part].numel() <= max(budget, keys) for part in parts)
    picked = torch.tensor([3, 0])
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        wanted = scores[row, start:end].to(dtype).float()
        for got in (seen, by_rows):
            assert torch.equal(got[row, : end - start], wanted)
    assert torch.equal(deferred[picked][1, :203], by_rows[0])
