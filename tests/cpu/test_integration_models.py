"""Other models through the hook: compressed indexer keys (DeepSeek-V4), and layers that share (GLM)."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from engine import BY_PHASE, SHAPES, Engine, Request, fake_package
from integration_setup import both_ways, hooked, lines_of, running, state_of

from gvr_topk.integrations import tensorrt_llm as integration

pytestmark = pytest.mark.usefixtures("undisturbed")


def decode(dsa, next_n: int, lengths: list[int], steps: int, **options) -> tuple[Engine, list[torch.Tensor]]:
    """Requests with uneven lengths, a changing order and a random number of accepted drafts."""
    engine = Engine(dsa, max_requests=len(lengths), **options)
    requests = [Request(i, n, n + 99, seed=i, done=n) for i, n in enumerate(lengths, 1)]
    rng = random.Random(next_n)
    seen = []
    for _ in range(steps):
        rng.shuffle(requests)
        seen += engine.step([], requests, next_n=next_n)
        for request in requests:
            request.done += rng.randint(1, next_n)
    return engine, seen


@pytest.mark.parametrize("shape", BY_PHASE)
@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("ratio", [4, 128])
def test_compressed_keys_give_the_same_sets(shape, monkeypatch, next_n, ratio):
    """Lengths pass through every remainder, from rows without a single score to rows far above k."""
    with fake_package(shape, topk=8):
        options = {"topk": 8, "max_len": 300, "compress_ratio": ratio}
        work = partial(decode, next_n=next_n, lengths=[1, 2, 3, 30, 61, 130], steps=24, **options)
        engine, chosen, rows = both_ways(monkeypatch, work)
        assert len(chosen) == 48 and rows == 48 * 6 * next_n
        assert {path for path, _ in integration.counters().calls} == {"gvr_topk"}
        assert any((row == -1).all() for rows in chosen for row in rows)
        state = state_of(engine)
        long = state.requests.slot_of(6)
        assert ratio > 4 or (state.requests.words[:, long, 0] > 48).all()


@pytest.mark.parametrize("shape", BY_PHASE)
@pytest.mark.parametrize("topk, ratio", [(512, 4), (1024, 4), (512, 1), (1024, 1)])
def test_the_k_of_deepseek_v4(shape, monkeypatch, topk, ratio):
    lengths = [ratio * (topk + extra) + 1 for extra in (0, 3, 20)]
    with fake_package(shape, topk=topk):
        options = {"topk": topk, "layers": 1, "max_len": 4300, "compress_ratio": ratio}
        work = partial(decode, next_n=1, lengths=lengths, steps=3, **options)
        _, chosen, rows = both_ways(monkeypatch, work)
        assert (chosen[-1] >= 0).all() and chosen[-1].shape == (3, topk) and rows == 9
        assert integration.counters().calls == {("gvr_topk", "hint"): 3}


def test_any_number_of_draft_rows_of_compressed_keys(monkeypatch):
    """Rows without room for a slot run without a state."""
    for next_n, reason in ((32, "hint"), (33, "no_state")):
        with fake_package("trtllm_1_3_rc27"):
            work = partial(decode, next_n=next_n, lengths=[40], steps=2, compress_ratio=4)
            *_, rows = both_ways(monkeypatch, work)
            assert rows == 4 * next_n
            assert {("gvr_topk", reason)} <= set(integration.counters().calls)
            assert {served for served, _ in integration.counters().calls} == {"gvr_topk"}
            integration.uninstall()


@pytest.mark.parametrize("told", [True, False])
def test_lengths_between_which_the_state_is_used_are_those_of_scores(monkeypatch, told):
    """The indexer's layers have 4 keys per score, whatever the ratio of layers without an indexer."""
    with fake_package("trtllm_1_3_rc27"):
        engine = Engine(hooked(monkeypatch, min_length=20), compress_ratio=4)
        assert max(engine.metadata.compress_ratios) == 128
        if not told:
            monkeypatch.setattr(engine.metadata, "get_indexer_max_seq_len", lambda: 40)
            del engine.metadata._indexer_compress_ratio
        engine.step([], [Request(i, n, 99, seed=i, done=n) for i, n in ((1, 78), (2, 79))])
        state = state_of(engine)
        assert [slot >= 0 for slot in state.requests.row_slot[:2].tolist()] == [False, True]


def test_layers_that_reuse_a_choice_make_no_call_and_leave_the_state_alone(shape, monkeypatch):
    options = {"layers": 6, "shared_layers": (1, 2, 4, 5)}
    engine, *_ = both_ways(monkeypatch, partial(decode, next_n=2, lengths=[30, 40, 50], steps=5, **options))
    assert integration.counters().calls == {("gvr_topk", "hint"): 10}
    words = state_of(engine).requests.words
    assert (words[[1, 2, 4, 5]] == -1).all() and (words[[0, 3], :3, 0] > 48).all()


@pytest.mark.parametrize("shape", SHAPES[3:], indirect=True)
def test_draft_passes_that_share_a_choice_are_no_calls(shape, monkeypatch):
    """``index_share_for_mtp_iteration``: later draft passes reuse the first one's selection."""
    engine = Engine(hooked(monkeypatch), layers=1)
    requests = running(1, 2)
    engine.metadata.set_in_mtp_draft_loop(True)
    (first,) = engine.step([], requests)
    engine.metadata.set_skip_topk(True)
    (second,) = engine.step([], requests)
    assert torch.equal(first, second)
    assert integration.counters().calls == {("gvr_topk", "hint"): 1}
    assert lines_of("warning") == []
