"""The hook at work: fake indexers of all five shapes, random batches, hook on against hook off."""

from __future__ import annotations

import random
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from engine import BY_PHASE, SHAPES, Engine, Request, fake_package
from integration_setup import (
    Watch,
    both_ways,
    check_decode_rows,
    hooked,
    lines_of,
    named_arguments,
    running,
    state_of,
)

from eval.campaigns.evidence import read_evidence
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations.tensorrt_llm import hook as layer_hook
from gvr_topk.integrations.tensorrt_llm.selection import DecodeOp

pytestmark = pytest.mark.usefixtures("undisturbed")


def plan(seed: int, steps: int, max_requests: int, next_n: int, max_len: int):
    """A random schedule: per step the context chunks, the generations, and whether to pad."""
    rng = random.Random(seed)
    live: list[Request] = []
    next_id = 100
    for _ in range(steps):
        while len(live) < max_requests and rng.random() < 0.4:
            prompt = rng.randint(4, 40)
            live.append(Request(next_id, prompt, prompt + rng.randint(8, 90), seed=next_id))
            next_id += 1
        contexts = [(r, min(rng.randint(4, 40), r.prompt - r.done)) for r in live if r.done < r.prompt]
        generations = [r for r in live if r.done >= r.prompt]
        rng.shuffle(generations)  # rows move between steps
        yield contexts, generations, rng.randint(0, max_requests - len(live)) if not contexts else 0
        for request, chunk in contexts:
            request.done += chunk
        for request in generations:
            request.done += rng.randint(1, next_n)  # accepted draft tokens; the rest is rewritten
        live = [r for r in live if r.done < min(r.tokens, max_len - next_n)]


def run(dsa, steps=100, next_n=1, seed=0, graphs=True, phases=False, **engine_options):
    """Run a schedule and return the selected positions of every step."""
    engine = Engine(dsa, **engine_options)
    graph = engine.metadata.create_cuda_graph_metadata(engine.max_requests, max_draft_tokens=next_n - 1)
    seen = []
    for contexts, generations, padding in plan(seed, steps, engine.max_requests, next_n, engine.max_len):
        if not contexts and not generations:
            continue
        metadata = graph if graphs and not contexts else None
        padding = padding if metadata is not None and generations else 0
        seen += engine.step(
            contexts, generations, next_n=next_n, padding=padding, metadata=metadata, phases=phases
        )
    return engine, seen


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_same_sets_with_and_without(shape, monkeypatch, next_n):
    *_, rows = both_ways(monkeypatch, partial(run, next_n=next_n, seed=next_n))
    assert rows > 300
    counted = integration.counters()
    assert counted.calls["gvr_topk", "hint"] > 100
    assert not any(path == "original" for path, _ in counted.calls), counted.calls
    assert counted.rows["dummy"] > 0 and counted.steps["graph"] > 0 and counted.steps["eager"] > 0


@pytest.mark.parametrize("shape", ["trtllm_1_4"], indirect=True)
def test_same_sets_with_the_top_k_of_1_4(shape, monkeypatch):
    *_, rows = both_ways(monkeypatch, partial(run, next_n=2, seed=9))
    assert sys.modules["tensorrt_llm"].__version__ == "1.4.0rc1" and rows > 300
    assert {path for path, _ in integration.counters().calls} == {"gvr_topk"}


@pytest.mark.parametrize("shape", BY_PHASE, indirect=True)
def test_same_sets_phase_by_phase(shape, monkeypatch):
    *_, rows = both_ways(monkeypatch, partial(run, seed=7, phases=True), keep_positions=True)
    assert rows > 300 and integration.counters().requests["seeded"] > 5
    assert not any(path == "original" for path, _ in integration.counters().calls)


@pytest.mark.parametrize("options", [{"keep_positions": True}, {"stats": True}])
def test_same_sets_with_positions(shape, monkeypatch, options):
    engine, _, rows = both_ways(monkeypatch, partial(run, steps=60, next_n=2, seed=5), **options)
    assert rows > 100 and state_of(engine).requests.indices is not None


def test_a_slot_holds_what_its_request_has_left_wherever_its_row_stands(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch, keep_positions=True))
    requests = running(11, 12, 13)
    chosen = engine.step([], requests)
    slots = state_of(engine).requests
    own = [slots.slot_of(request.request_id) for request in requests]
    words = slots.words[:, own].clone()
    assert (words[..., 0] > 48).all()  # not unknown, and no window of values
    assert len({tuple(values) for values in words[..., 1].T.tolist()}) == 3
    for positions, rows in zip(slots.indices[:, own], chosen, strict=True):
        assert torch.equal(positions.sort(dim=1).values, rows)
    engine.step([], requests[::-1])  # the same step again, rows in another order
    assert torch.equal(slots.words[:, own], words)
    engine.step([], [requests[2], requests[1]])
    assert slots.row_slot[:3].tolist() == [own[2], own[1], -1]


@pytest.mark.parametrize(
    ("variable", "options", "passed"),
    [
        # Kernels are launched early where TensorRT-LLM launches its own so.
        ("1", {}, {"pdl": True, "max_ctas": 0}),
        ("0", {}, {"pdl": False}),
        (None, {"max_ctas": 8}, {"pdl": False, "max_ctas": 8}),
    ],
)
def test_what_reaches_the_op(shape, monkeypatch, variable, options, passed):
    monkeypatch.delenv("TRTLLM_ENABLE_PDL", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRTLLM_ENABLE_PDL", variable)
    given = named_arguments(monkeypatch)
    Engine(hooked(monkeypatch, **options)).step([], running(11))
    assert [{name: arguments[name] for name in passed} for arguments in given] == [passed] * 2


def test_a_new_request_starts_without_what_another_one_left(shape, monkeypatch):
    """Also the disaggregated start: a request whose prompt was computed elsewhere."""
    engine = Engine(hooked(monkeypatch, stats=True), max_requests=2)
    engine.manager.max_batch_size = 2
    old = running(21, 22)
    engine.step([], old)
    state = state_of(engine)
    slot = state.requests.slot_of(21)
    seen = []
    original = state.requests.set_rows

    def noting(*given):
        rows = original(*given)
        seen.append(state.requests.words[:, slot].clone())
        return rows

    monkeypatch.setattr(state.requests, "set_rows", noting)
    old[1].done += 1
    engine.step([], [old[1], Request(23, 40, 99, seed=23, done=40)])
    assert state.requests.slot_of(21) == -1 and state.requests.slot_of(23) == slot
    assert (seen[0] == -1).all()


def test_the_last_prompt_row_seeds_the_slot(shape, monkeypatch):
    dsa = hooked(monkeypatch, keep_positions=True)
    for phases in (False, True) if shape in BY_PHASE else (False,):
        engine = Engine(dsa)
        running = Request(31, 30, 99, seed=31, done=40)
        long, short = Request(32, 60, 99, seed=32), Request(33, 20, 99, seed=33)
        engine.step([(long, 40), (short, 20)], [running], phases=phases)  # chunked: 40 of 60
        long.done, short.done, running.done = 40, 20, 41
        result = engine.step([(long, 20)], [short, running], phases=phases)
        state = state_of(engine)
        for layer, rows in enumerate(result):
            seeded = state.requests.indices[layer, state.requests.slot_of(32)]
            assert torch.equal(seeded.sort().values, rows[19])
        assert (state.requests.words[:, state.requests.slot_of(32)] == -1).all()
        alone = Request(34, 60, 99, seed=34)
        for chunk in (40, 20):  # the same rows twice
            result = engine.step([(alone, chunk)], [], phases=phases)
            alone.done += chunk
        for layer, rows in enumerate(result):
            seeded = state.requests.indices[layer, state.requests.slot_of(34)]
            assert torch.equal(seeded.sort().values, rows[19])


def test_padding_and_dummy_requests_neither_read_nor_write(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch))
    real = Request(41, 30, 99, seed=41, done=30)
    graph = engine.metadata.create_cuda_graph_metadata(4, max_draft_tokens=1)
    engine.step([], [real], next_n=2, padding=3, metadata=graph)
    state = state_of(engine)
    slot = state.requests.slot_of(41)
    assert state.draft_row_slot[:8].tolist() == [slot, slot] + [-1] * 6
    others = [i for i in range(state.requests.num_slots) if i != slot]
    assert (state.requests.words[:, slot, 0] > 48).all() and (state.requests.words[:, others] == -1).all()
    # An idle attention-DP rank runs a single dummy with id 0.
    engine.step([], [Request(0, 30, 99, seed=1, done=30)])
    assert state.requests.row_slot[0] == -1 and state.requests.slot_of(0) == -1


def test_draft_steps_inside_a_step_use_one_row_per_request(shape, monkeypatch):
    """MTP's later draft passes: same batch, next_n = 1, and contexts already count as generations."""
    engine = Engine(hooked(monkeypatch))
    prompt, running = Request(51, 20, 99, seed=51), Request(52, 30, 99, seed=52, done=30)
    engine.step([(prompt, 20)], [running], next_n=3)
    state, metadata = state_of(engine), engine.metadata
    assert state.row_slot(metadata, 3, 3).tolist() == [state.requests.slot_of(52)] * 3
    metadata.num_contexts = 0
    metadata.seq_lens = torch.ones(2, dtype=torch.int32)
    expected = [state.requests.slot_of(51), state.requests.slot_of(52)]
    assert state.row_slot(metadata, 1, 2).tolist() == expected
    assert state.row_slot(metadata, 2, 4) is None  # rows that were not announced: no hint, not a wrong one
    other = metadata.create_cuda_graph_metadata(4)
    assert state.row_slot(other, 1, 2) is None


@pytest.mark.parametrize("next_n", [1, 3])
def test_the_hooked_call_adds_no_work_of_its_own(shape, monkeypatch, next_n):
    """Nothing is allocated, copied or read back between the logits and our op: fit for CUDA graphs."""
    engine = Engine(hooked(monkeypatch), layers=1)
    requests = running(61, 62)
    engine.step([], requests, next_n=next_n)
    hook, indexer, metadata = integration.plugin._integration.hook, engine.indexers[0], engine.metadata
    logits = torch.randn(2 * next_n, engine.max_len)
    lengths = metadata.kv_lens_cuda_runtime[:2]
    buffer = torch.empty(2 * next_n, engine.topk, dtype=torch.int32)
    hook._local.call = hook._open_call(indexer, metadata)
    addresses = [state_of(engine).requests.row_slot.data_ptr(), state_of(engine).draft_row_slot.data_ptr()]
    try:
        with Watch() as watch:
            indexer.decode_topk(metadata, logits, lengths, buffer, next_n)
    finally:
        del hook._local.call
    views = {"aten::slice.Tensor", "aten::select.int", "aten::alias", "aten::view", "aten::detach"}
    theirs = {"aten::floor_divide"}  # the lengths that the indexer hands to TopK
    added = [name for name in watch.seen if name not in views | theirs]
    assert added == ["gvr_topk::indexer_topk_decode.usual"]
    engine.step([], requests, next_n=next_n)
    state = state_of(engine)
    assert addresses == [state.requests.row_slot.data_ptr(), state.draft_row_slot.data_ptr()]


@pytest.mark.parametrize("shape", ["trtllm_1_2", "trtllm_1_3_monolith"], indirect=True)
def test_short_rows_alone_are_said_and_no_evidence(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch))
    short, longer = Request(71, 4, 99, seed=71, done=5), Request(72, 4, 99, seed=72, done=40)
    for _ in range(2):
        engine.step([], [short])
    assert integration.counters().steps["skipped"] == 2 and not integration.counters().calls
    (line,) = lines_of("info")
    assert "waiting: no row is longer than index_topk = 16 so far" in line
    evidence = read_evidence([line])
    assert not evidence.active and not evidence.refused
    assert "no row was longer than index_topk" in evidence.problem("on")
    assert evidence.problem("off") is None
    engine.step([], [longer])
    _, line = lines_of("info")
    assert "on: 2 layers" in line
    assert read_evidence(lines_of("info")).problem("on") is None
    assert lines_of("warning") == []


def test_lengths_outside_the_window_use_no_hint(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch, min_length=40, max_length=60))
    requests = [Request(i, 20, 99, seed=i, done=n) for i, n in ((81, 38), (82, 39), (83, 59), (84, 60))]
    for expected in ([False, True, True, False], [True, True, False, False]):  # the same rows have grown
        engine.step([], requests)
        used = [slot >= 0 for slot in state_of(engine).requests.row_slot[:4].tolist()]
        assert used == expected
        for request in requests:
            request.done += 1
    assert integration.counters().rows == {"too_short": 1, "hinted": 4, "too_long": 3}


def test_rows_no_longer_than_k_keep_their_slot_whatever_the_window(shape, monkeypatch):
    """Nothing is selected in them, so the gate says so before it looks at the configured lengths."""
    engine = Engine(hooked(monkeypatch, min_length=40))
    engine.step([], [Request(i, 10, 99, seed=i, done=n) for i, n in ((81, 15), (82, 16))])
    used = [slot >= 0 for slot in state_of(engine).requests.row_slot[:2].tolist()]
    assert used == [True, False]


def test_more_draft_tokens_than_rows_are_expected_for(shape, monkeypatch):
    """Where few requests are alive, each may have as many rows as there is room for in all."""
    engine = Engine(hooked(monkeypatch), max_requests=2)
    engine.manager.max_batch_size = 2
    request = Request(7, 30, 99, seed=7, done=30)
    for next_n in (9, 16, 17):
        engine.step([], [request], next_n=next_n)
        state = state_of(engine)
        rows = state.row_slot(engine.metadata, next_n, next_n)
        assert state.max_rows == 16 and (rows is None) == (next_n == 17)
        assert rows is None or set(rows.tolist()) == {state.requests.slot_of(7)}
        request.done += 1
    assert integration.counters().calls == {("gvr_topk", "hint"): 4, ("gvr_topk", "no_state"): 2}


def test_more_requests_than_expected_still_give_the_same_sets(shape, monkeypatch):
    def six_after_two(capacity):
        engine = Engine(dsa, max_requests=2)
        engine.manager.max_batch_size = capacity
        requests = running(*range(91, 97))
        engine.step([], requests[:2])
        return engine.step([], requests, metadata=engine.metadata.create_cuda_graph_metadata(20))

    dsa = hooked(monkeypatch)
    result = six_after_two(8)
    assert "over capacity" not in integration.counters().steps
    narrow = six_after_two(2)
    assert integration.counters().steps["over capacity"] == 1
    assert integration.counters().calls["gvr_topk", "no_state"] == 2
    integration.uninstall()
    plain = six_after_two(8)
    for with_slots, without, theirs in zip(result, narrow, plain, strict=True):
        assert torch.equal(with_slots, theirs) and torch.equal(without, theirs)


NATIVE = [*((shape, "heuristic") for shape in BY_PHASE), ("trtllm_1_3_rc27", "cute_dsl")]


@pytest.mark.parametrize("native, asked", NATIVE)
def test_another_topk_of_theirs_is_named_and_never_called_ours(monkeypatch, native, asked):
    """On Blackwell TensorRT-LLM has top-k kernels of its own; ours runs only where it is forced."""
    monkeypatch.setenv("FAKE_SM_VERSION", "100")
    results = {}
    for mode in ("1", "force"):
        with fake_package(native):
            engine = Engine(hooked(monkeypatch, mode), **{asked: True})
            for _ in range(2):
                results[mode] = engine.step([], running(5))
            calls = integration.counters().calls
            (path, reason), count = next(iter(calls.items()))
            assert len(calls) == 1 and count == 4
            if mode == "force":
                assert (path, reason) == ("gvr_topk", "hint")
                assert lines_of("warning") == [] and "on: 2 layers" in lines_of("info")[0]
            else:
                assert path == "original" and reason.startswith("TensorRT-LLM runs ")
                (line,) = lines_of("warning")
                assert f"not in use: {reason}. TRTLLM_GVR_TOPK=force runs gvr_topk instead" in line
                assert lines_of("info") == []
            integration.uninstall()
    assert all(torch.equal(a, b) for a, b in zip(results["1"], results["force"], strict=True))


@pytest.mark.parametrize(
    "shape", ["trtllm_1_3_monolith", "trtllm_1_3_package", "trtllm_1_3_rc25"], indirect=True
)
@pytest.mark.parametrize("mode", ["1", "force"])
def test_a_topk_that_passes_us_by_is_counted_and_said(shape, monkeypatch, mode):
    monkeypatch.setenv("FAKE_SM_VERSION", "100")
    engine = Engine(hooked(monkeypatch, mode), cute_dsl=True)
    prompt, request = Request(6, 30, 99, seed=6), Request(5, 30, 99, seed=5, done=30)
    engine.step([(prompt, 30)], [])  # no decode row: nothing was passed by
    assert not integration.counters().calls
    for _ in range(2):
        engine.step([], [request])
    assert integration.counters().calls == {("original", "an op that is not replaced"): 4}
    (line,) = lines_of("warning")
    assert "not in use" in line and "Remove use_cute_dsl_topk" in line
    assert lines_of("info") == []


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda op, x, n, out: op(x, n, out, 1, 8), "another k"),
        (lambda op, x, n, out: op(x.t().contiguous().t(), n, out, 1), "layout"),
    ],
)
def test_what_we_cannot_take_goes_to_the_original(monkeypatch, call, reason):
    with fake_package("trtllm_1_3_package"):
        engine = Engine(hooked(monkeypatch))
        engine.step([], running(1, 2))
        before = integration.counters().calls.get(("gvr_topk", "hint"), 0)
        op, hook = torch.ops.trtllm.indexer_topk_decode, integration.plugin._integration.hook
        hook._local.call = hook._open_call(engine.indexers[0], engine.metadata)
        logits, out = torch.randn(2, 160), torch.full((2, 16), -7, dtype=torch.int32)
        call(op, logits, torch.tensor([100, 120], dtype=torch.int32), out)
        del hook._local.call
        assert integration.counters().calls["original", reason] == 1
        assert integration.counters().calls["gvr_topk", "hint"] == before
        assert (out[:, 0] >= 0).all()


@pytest.mark.parametrize(
    ("args", "named", "k", "ratio", "native"),
    [
        ((), {}, 2048, 1, False),
        ((512,), {}, 512, 1, False),
        ((512, None, "scratch"), {}, 512, 1, False),
        ((512, None, "scratch", 4), {}, 512, 4, False),
        ((512, None, "scratch", 4, "more"), {}, 512, 4, False),
        ((512, "prior", None), {}, 512, 1, True),
        ((), {"pre_idx": "prior", "index_topk": 512}, 512, 1, True),
        ((512,), {"compress_ratio": 128, "scratch": "scratch"}, 512, 128, False),
    ],
)
@pytest.mark.parametrize("served", [False, True])
def test_arguments_of_their_op_by_position_and_by_name(args, named, k, ratio, native, served):
    """In the order ``index_topk, pre_idx, scratch, compress_ratio``, behind the four that each call has."""
    passed_on, selected = [], []

    class Original:
        schema = SimpleNamespace(arguments=[SimpleNamespace(name="index_topk", default_value=2048)])
        default = SimpleNamespace(_schema=schema)

        def __call__(self, *args, **kwargs):
            passed_on.append((args, kwargs))

    op = DecodeOp(Original(), lambda selection, original: selected.append(selection) or served)
    four = ("logits", "lengths", "indices", 3)
    op(*four, *args, **named)
    (seen,) = selected
    assert (seen.logits, seen.seq_lens, seen.indices, seen.next_n) == four
    assert (seen.k, seen.compress_ratio, bool(seen.native)) == (k, ratio, native)
    assert passed_on == ([] if served else [((*four, *args), named)])


def test_after_an_error_of_ours_theirs_serves_for_good(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch))
    plain = Engine(engine.dsa).step([], running(1))
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        raise ValueError("logits:\n  no")

    monkeypatch.setattr(layer_hook, "indexer_topk_decode", failing)
    for _ in range(2):
        result = engine.step([], running(1))
    other = Engine(engine.dsa).step([], running(1))
    assert all(torch.equal(a, b) for a, b in zip(result, plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(other, plain, strict=True))
    assert len(calls) == 1
    assert integration.counters().calls["original", "error: ValueError"] == 6
    (line,) = lines_of("warning")
    assert line.endswith("fell back: ValueError: logits: no. TensorRT-LLM's own top-k serves from now on")
    assert read_evidence([line]).refused


def test_the_first_calls_are_verified(shape, monkeypatch):
    """Under the name that reaches worker processes, too; an op that is wrong is noticed and off for good."""
    monkeypatch.setenv("TRTLLM_GVR_TOPK_VERIFY", "3")
    engine = Engine(hooked(monkeypatch))
    check_decode_rows(in_order=False)
    for done in range(60, 64):
        engine.step([], running(1, done=done), next_n=2)
    assert sum(line.endswith(": verified 3 calls of decode top-k") for line in lines_of("info")) == 1
    assert set(integration.counters().calls) == {("gvr_topk", "hint")}
    integration.uninstall()
    engine = Engine(hooked(monkeypatch))
    monkeypatch.setattr(layer_hook, "indexer_topk_decode", lambda *args, out, **named: out.fill_(0))
    for _ in range(2):
        engine.step([], running(1, done=60))
    assert integration.counters().calls == {("original", "error: Differs"): 4}
    (line,) = lines_of("warning")
    differs = "fell back: Differs: row 0 of 1: an item is selected twice"
    assert f"{differs}. TensorRT-LLM's own top-k serves" in line


def test_an_unusable_batch_is_refused_with_the_attribute(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch))
    del engine.manager.num_local_layers
    engine.step([], running(1))
    (line,) = lines_of("warning")
    assert "DSACacheManager()" in line and "num_local_layers" in line
    assert read_evidence([line]).refused


def test_a_second_manager_has_its_own_hints(shape, monkeypatch):
    """TensorRT-LLM makes one cache to measure memory and another one to serve."""
    dsa = hooked(monkeypatch)
    first, second = Engine(dsa), Engine(dsa, first_layer=3)
    for engine in (first, second):
        engine.step([], running(1))
    assert state_of(first) is not state_of(second)
    (line,) = lines_of("info")
    assert "on: 2 layers, k = 16, 16 requests, 0.0 MiB of state (predictor), path auto on cpu" in line
    assert read_evidence([line]).active and not read_evidence([line]).refused


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_micro_batches_of_a_pipeline_do_not_evict_each_other(shape, monkeypatch, stages):
    """Each of the alternating batches is full, and finds at its next turn what its requests left."""
    engine = Engine(hooked(monkeypatch), max_requests=2, layers=1, pp_size=stages)
    engine.manager.max_batch_size = 2
    batches = [running(100 + 2 * b, 101 + 2 * b) for b in range(stages)]
    for turn in range(3):
        for batch in batches:
            engine.step([], batch)
            slots = state_of(engine).requests
            assert turn == 0 or slots.evicted == 0
            for request in batch:
                request.done += 1
    assert slots.admitted == 2 * stages and (slots.words[:, : 2 * stages, 0] > 48).all()


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_calls_are_named_for_profilers_where_there_is_a_gpu(monkeypatch, enabled, has_gpu):
    ranges = []
    with fake_package(SHAPES[0]):
        engine = Engine(hooked(monkeypatch, nvtx=enabled))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
        engine.step([], running(1))
        assert integration.counters().calls == {("gvr_topk", "hint"): 2}
    named = ["gvr_topk layer 0", "end", "gvr_topk layer 1", "end"]
    assert ranges == (named if enabled and has_gpu else [])


@pytest.mark.parametrize("next_n", [1, 3])
def test_a_step_with_the_rows_of_the_last_one_copies_nothing(shape, monkeypatch, next_n):
    engine = Engine(hooked(monkeypatch))
    requests = running(1, 2, 3)
    engine.step([], requests, next_n=next_n)
    metadata, state, counters = engine.metadata, state_of(engine), integration.counters
    seen, before = [], counters().rows["hinted"]
    for ids in ([1, 2, 3], [1, 2, 3], [2, 1, 3], [2, 1, 3], [2, 1]):
        metadata.set_batch(ids, [next_n] * len(ids), 0, [31] * len(ids))
        with Watch() as watch:
            state.update(metadata, integration.plugin._integration.counters)
        seen.append(any("copy" in name for name in watch.seen))
        expected = [state.requests.slot_of(i) for i in ids for _ in range(next_n)]
        assert state.row_slot(metadata, next_n, len(ids) * next_n).tolist() == expected
    assert seen == [False, False, True, False, True]
    assert counters().rows["hinted"] - before == 14 * next_n
    state.requests.release(2)  # its rows have to be given a slot again
    state.update(metadata, integration.plugin._integration.counters)
    assert state.row_slot(metadata, next_n, 2 * next_n)[0] == state.requests.slot_of(2) >= 0


def test_requests_with_different_numbers_of_drafts_use_no_state(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch))
    requests = running(1, 2)
    engine.step([], requests)
    engine.metadata.set_batch([1, 2], [1, 2], 0, [30, 30])
    engine.metadata.prepare()
    assert integration.counters().steps["ragged"] == 1
    assert state_of(engine).row_slot(engine.metadata, 1, 2) is None
    engine.step([], requests)
    assert integration.counters().calls == {("gvr_topk", "hint"): 4}
