"""Draft tokens: the state is that of the last accepted row, where TensorRT-LLM tells which one that is."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from engine import SHAPES, Engine, Request, fake_package, load_dsa
from integration_setup import check_decode_rows, hooked, lines_of, state_of

from gvr_topk import TopkState
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations.tensorrt_llm import hook as layer_hook
from gvr_topk.integrations.tensorrt_llm.hint_state import ROWS_PER_REQUEST, HintState
from gvr_topk.ops import indexer_topk_decode

TELLING = SHAPES[3:]
"""Those with a place for the number of accepted rows."""


@pytest.fixture(params=TELLING)
def telling(request):
    with fake_package(request.param):
        yield request.param


pytestmark = pytest.mark.usefixtures("undisturbed")


def words_of(engine, request: Request) -> torch.Tensor:
    slots = state_of(engine).requests
    return slots.words[:, slots.slot_of(request.request_id)].clone()


def started(engine, *ids: int) -> list[Request]:
    """Requests whose prompt of 30 tokens is in the cache."""
    requests = [Request(i, 30, 150, seed=i) for i in ids]
    for request in requests:
        engine.step([(request, 30)], [])
        request.done = 30
    return requests


@functools.cache
def alone_states(request_id: int, prompt: int, tokens: int, **engine_options) -> dict[int, torch.Tensor]:
    """What each token of a request leaves when it is computed alone, by the keys in the cache after it.

    It is the same for all versions of the engine.
    """
    engine = Engine(load_dsa(), **{"mtp": True, **engine_options})
    alone = Request(request_id, prompt, tokens, seed=request_id)
    engine.step([(alone, prompt)], [])
    alone.done = prompt
    states = {}
    while alone.done < tokens:
        engine.step([], [alone])
        alone.done += 1
        states[alone.done] = words_of(engine, alone)
    return states


@pytest.mark.parametrize(("attention_dp", "takes_back"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize(("next_n", "compress_ratio"), [(2, 1), (3, 4), (4, 1)])
def test_the_state_is_that_of_the_last_accepted_row(
    telling, monkeypatch, next_n, compress_ratio, attention_dp, takes_back
):
    """Requests enter and leave, rows move, eager and graph steps with padding take turns."""
    options = {"layers": 3, "mtp": True, "attention_dp": attention_dp}
    options |= {"compress_ratio": compress_ratio, "topk": 8 if compress_ratio > 1 else 16}
    engine = Engine(hooked(monkeypatch), takes_back=takes_back, **options)
    graph = engine.metadata.create_cuda_graph_metadata(engine.max_requests, max_draft_tokens=next_n - 1)
    rng = random.Random(next_n)
    live = [Request(i, 36 + i % 5, 36 + i % 5 + rng.randint(10, 40), seed=i) for i in range(100, 103)]
    compared = partly = 0
    for step in range(40):
        if len(live) < 4 and rng.random() < 0.5:
            live.append(Request(200 + step, 40, 40 + rng.randint(10, 40), seed=200 + step))
        rng.shuffle(live)
        contexts = [(r, r.prompt) for r in live if r.done == 0]
        generations = [r for r in live if r.done]
        metadata = engine.metadata if contexts or step % 3 == 0 else graph
        padding = 4 - len(live) if metadata is graph and generations else 0
        accepted = [rng.randint(1, next_n) for _ in generations]
        if not contexts and not generations:
            continue
        told = state_of(engine) is not None and state_of(engine).next_state is not None
        given = {"next_n": next_n, "padding": padding, "metadata": metadata, "accepted": accepted}
        engine.step(contexts, generations, **given)
        for request, chunk in contexts:
            request.done = chunk
        metadata.prepare()  # as the next step does, whatever its batch
        for request, count in zip(generations, accepted, strict=True):
            request.done += count
            if not told:
                continue  # the first step: its first layers did not know that they would be told
            alone = alone_states(request.request_id, request.prompt, request.tokens + next_n, **options)
            torch.testing.assert_close(words_of(engine, request), alone[request.done])
            compared += 1
            partly += count < next_n
        live = [r for r in live if r.done < r.tokens]
    assert compared > 40 and partly > 15
    assert (state_of(engine).next_state == -1).all()


@pytest.mark.parametrize("known", [True, False])
def test_draft_layers_with_a_cache_of_their_own_are_ours(shape, known, monkeypatch):
    """The draft loop swaps the cache manager; one that no step knew before is served without a state."""
    engine = Engine(hooked(monkeypatch), layers=3, mtp=True)
    compared = check_decode_rows(in_order=True)
    if not known:
        engine.metadata.draft_kv_cache_manager = None
    rng = random.Random(0)
    live: list[Request] = []
    steps = 0
    for step in range(30):
        arrives = len(live) < 4 and rng.random() < 0.7
        contexts = [(Request(step, 40, 60, seed=step), 40)] if arrives else []
        padding = int(not contexts and 0 < len(live) < 4)
        accepted = [rng.randint(1, 3) for _ in live]
        if contexts or live:
            engine.step(contexts, live, next_n=3, padding=padding, accepted=accepted)
            steps += bool(live)
        for request, count in zip(live, accepted, strict=True):
            request.done += count
        for request, chunk in contexts:
            request.done = chunk
        live = [r for r in [*live, *(r for r, _ in contexts)] if r.done < 100]
    calls = integration.counters().calls
    assert steps > 20 and len(compared) == 3 * steps
    if known:
        assert calls == {("gvr_topk", "hint"): 3 * steps}
    else:
        assert calls == {("gvr_topk", "hint"): 2 * steps, ("gvr_topk", "no_state"): steps}
    assert any("drafts:" in line for line in lines_of("info")) == (shape in TELLING)
    assert lines_of("warning") == []


def test_a_replayed_graph_needs_no_python(telling, monkeypatch):
    """Captured calls write where they always did; before the next step the accepted rows are taken over."""
    engine = Engine(hooked(monkeypatch), mtp=True)
    next_n, k = 3, engine.topk
    requests = started(engine, 1, 2)
    engine.step([], requests, next_n=next_n, accepted=[1, 1])  # a warm-up run
    graph = engine.metadata.create_cuda_graph_metadata(4, max_draft_tokens=next_n - 1)
    calls, told = [], torch.ones(4, dtype=torch.int32)

    def recording(*args, **kwargs):
        calls.append((args, kwargs))
        return indexer_topk_decode(*args, **kwargs)

    monkeypatch.setattr(layer_hook, "indexer_topk_decode", recording)
    engine.step([], requests, next_n=next_n, padding=2, metadata=graph, accepted=[1, 1], tell=told)
    assert len(calls) == engine.layers and graph.mtp_num_accepted is None
    state = state_of(engine)
    addresses = [kwargs["next_state"].data_ptr() for _, kwargs in calls]
    row_bytes = state.next_state.nbytes // engine.layers
    assert addresses == [state.next_state.data_ptr() + i * row_bytes for i in range(engine.layers)]
    monkeypatch.setattr(layer_hook, "indexer_topk_decode", None)
    monkeypatch.setattr(HintState, "note_accepted", None)
    generator = torch.Generator().manual_seed(3)
    ids = [r.request_id for r in requests]
    for turn in range(6):
        ids.reverse()
        dummies = [(1 << 64) - 1] * 2
        lengths = [40 + turn, 60 + turn, 1, 1]
        graph.set_batch([*ids, *dummies], [next_n] * 4, 0, lengths)
        graph.prepare()
        counts = [1 + turn % next_n, 1 + (turn + 2) % next_n]
        for (logits, *rest), kwargs in calls:
            logits.copy_(torch.randn(logits.shape, generator=generator))
            indexer_topk_decode(logits, *rest, **kwargs)
        told.copy_(torch.tensor([*counts, 1, 1]))
        before = state.requests.words.clone()
        graph.prepare()
        for layer, ((logits, *_), _) in enumerate(calls):
            for i, count in enumerate(counts):
                alone, row = TopkState(1, k, keep_indices=False), i * next_n + count - 1
                n = torch.tensor([lengths[i] + count], dtype=torch.int32)
                indexer_topk_decode(logits[row : row + 1], n, k, state=alone)
                slot = state.requests.slot_of(ids[i])
                assert torch.equal(state.requests.words[layer, slot], alone.words[0])
        used = [state.requests.slot_of(i) for i in ids]
        others = [i for i in range(state.requests.num_slots) if i not in used]
        assert torch.equal(state.requests.words[:, others], before[:, others])


def test_a_slot_that_changes_hands_starts_empty(telling, monkeypatch):
    """What its last owner's rows have left is not brought back, and its neighbour gets its own."""
    engine = Engine(hooked(monkeypatch), mtp=True, max_requests=2)
    engine.manager.max_batch_size = 2
    first, second = started(engine, 1, 2)
    for _ in range(2):
        engine.step([], [first, second], next_n=2, accepted=[2, 1])
    state = state_of(engine)
    slot, kept = state.requests.slot_of(1), state.requests.slot_of(2)
    left = state.next_state[:, :4].clone()
    third = Request(3, 30, 99, seed=3, done=30)
    engine.metadata.set_batch([2, 3], [2, 2], 0, [second.done + 1, third.done])
    engine.metadata.prepare()
    assert state.requests.slot_of(3) == slot and state.requests.slot_of(1) == -1
    assert (state.requests.words[:, slot] == -1).all()
    assert torch.equal(state.requests.words[:, kept], left[:, 2])


def test_where_nothing_is_told_the_last_row_leaves_its_state(shape, monkeypatch):
    engine = Engine(hooked(monkeypatch), mtp=True)
    (request,) = started(engine, 1)
    nbytes = state_of(engine).nbytes
    accepted = None if shape in TELLING else [1]
    for _ in range(2):
        engine.step([], [request], next_n=3, accepted=accepted)
    state = state_of(engine)
    assert state.next_state is None and state.nbytes == nbytes
    torch.testing.assert_close(words_of(engine, request), alone_states(1, 30, 33)[33])
    assert not any("drafts:" in line for line in lines_of("info"))


def test_a_step_that_tells_nothing_behind_one_that_told_leaves_its_last_row_s_state(telling, monkeypatch):
    engine = Engine(hooked(monkeypatch), mtp=True)
    (request,) = started(engine, 1)
    for accepted in ([1], [1], None):
        engine.step([], [request], next_n=3, accepted=accepted)
        engine.metadata.prepare()
    torch.testing.assert_close(words_of(engine, request), alone_states(1, 30, 33)[33])


def test_positions_are_the_last_row_s_and_so_is_the_state_with_them(telling, monkeypatch):
    engine = Engine(hooked(monkeypatch, keep_positions=True), mtp=True)
    (request,) = started(engine, 1)
    for _ in range(2):
        (*_, last) = engine.step([], [request], next_n=3, accepted=[1])
    state = state_of(engine)
    assert state.next_state is None
    slot = state.requests.slot_of(1)
    assert torch.equal(state.requests.indices[-1, slot], last[2])


@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (torch.ones(2), "a tensor of integers by request, got float32 of 1 dimensions"),
        (torch.ones(2, 1, dtype=torch.int32), "a tensor of integers by request, got int32 of 2 dimensions"),
        ([1, 1], "a tensor of integers by request, got list"),
        (torch.ones(1, dtype=torch.int32), "one integer for each request of the batch on cpu"),
    ],
)
def test_a_number_of_another_kind_is_ignored_and_said_once(telling, monkeypatch, tell, said):
    dsa = hooked(monkeypatch)
    monkeypatch.setattr(dsa.Indexer, "last_rows", lambda *_: [0])  # the fake could not use it either
    engine = Engine(dsa, mtp=True)
    requests = started(engine, 1, 2)
    for _ in range(3):
        engine.step([], requests, next_n=2, accepted=[1, 1], tell=tell)
    (line,) = lines_of("warning")
    assert f"mtp_num_accepted is not used: wanted {said}" in line
    assert state_of(engine).next_state is None
    assert integration.counters().calls == {("gvr_topk", "hint"): 6}
    torch.testing.assert_close(words_of(engine, requests[0]), alone_states(1, 30, 32)[32])


def test_an_error_while_noting_is_said_and_harmless(telling, monkeypatch):
    engine = Engine(hooked(monkeypatch), mtp=True)
    (request,) = started(engine, 1)
    monkeypatch.setattr(HintState, "note_accepted", Mock(side_effect=KeyError("odd")))
    engine.step([], [request], next_n=2, accepted=[1])
    (line,) = lines_of("warning")
    assert "mtp_num_accepted is not used: KeyError" in line
    assert integration.counters().calls == {("gvr_topk", "hint"): 2}


def test_a_step_that_never_runs_or_has_other_rows_brings_nothing_back(telling, monkeypatch):
    engine = Engine(hooked(monkeypatch), mtp=True)
    requests = started(engine, 1, 2)
    for _ in range(2):
        engine.step([], requests, next_n=2, accepted=[1, 2])
    state = state_of(engine)
    left = state.next_state[:, :4].clone()
    engine.metadata.set_batch([1, 2], [1, 2], 0, [31, 32])  # no layout of ours: no rows of its own
    engine.metadata.prepare()
    assert torch.equal(words_of(engine, requests[0]), left[:, 0])
    assert torch.equal(words_of(engine, requests[1]), left[:, 3])
    before = state.requests.words.clone()
    for order in ([2, 1], [1, 2]):
        engine.metadata.set_batch(order, [2, 2], 0, [32, 32])
        engine.metadata.prepare()
        assert torch.equal(state.requests.words, before)


def test_one_buffer_for_good_that_is_counted_and_said(telling, monkeypatch):
    engine = Engine(hooked(monkeypatch), mtp=True)
    requests = started(engine, 1, 2)
    state = state_of(engine)
    nbytes = state.nbytes
    engine.step([], requests, next_n=2, accepted=[1, 2])
    address = state.next_state.data_ptr()
    assert state.next_state.shape == (engine.layers, 16 * ROWS_PER_REQUEST, 4)
    assert state.nbytes == nbytes + state.next_state.nbytes
    for next_n in (4, 1, 3):
        engine.step([], requests, next_n=next_n, accepted=[1, 1])
    assert state.next_state.data_ptr() == address
    (line,) = [line for line in lines_of("info") if "drafts: " in line]
    assert line.endswith("a state is the last accepted row's, for 0.0 MiB more")
    page = (Path(__file__).resolve().parents[2] / "docs" / "tensorrt_llm.md").read_text()
    per_request = ROWS_PER_REQUEST * state.next_state.shape[2] * 4
    assert f"{per_request} bytes more" in page and f"({61 * 2048 * per_request / 2**20:.1f} MiB" in page
