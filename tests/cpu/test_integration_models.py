"""Other models through the hook: compressed indexer keys (DeepSeek-V4), and layers that share (GLM)."""

from __future__ import annotations

import random

import pytest
import torch
from engine import BY_PHASE, SHAPES, Engine, Request, fake_package
from integration_setup import check_decode_rows, hooked, lines_of, state_of

from gvr_topk.integrations import tensorrt_llm as integration

pytestmark = pytest.mark.usefixtures("undisturbed")


def decode(engine: Engine, requests: list[Request], steps: int, next_n: int) -> list[torch.Tensor]:
    """Requests with uneven lengths, a changing order and a random number of accepted drafts."""
    rng = random.Random(next_n)
    seen = []
    for _ in range(steps):
        rng.shuffle(requests)
        seen += engine.step([], requests, next_n=next_n)
        for request in requests:
            request.done += rng.randint(1, next_n)
    return seen


def both_ways(monkeypatch, next_n: int, lengths: list[int], steps: int, **options):
    """What is selected without the hook and with it, each compared with the oracle, and the hooked engine."""
    results, compared = [], []
    for mode in ("0", "1"):
        dsa = hooked(monkeypatch, mode)
        compared.append(check_decode_rows(in_order=mode == "1"))
        engine = Engine(dsa, max_requests=len(lengths), **options)
        requests = [Request(i, n, n + 99, seed=i, done=n) for i, n in enumerate(lengths, 1)]
        results.append(decode(engine, requests, steps, next_n))
        if mode == "0":
            integration.uninstall()
    assert compared[0] == compared[1] and sum(compared[0]) > 0
    return *results, engine


@pytest.mark.parametrize("shape", BY_PHASE)
@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("ratio", [4, 128])
def test_compressed_keys_give_the_same_sets(shape, monkeypatch, next_n, ratio):
    """Lengths pass through every remainder, from rows without a single score to rows far above k."""
    with fake_package(shape, topk=8):
        options = {"topk": 8, "max_len": 300, "compress_ratio": ratio}
        plain, chosen, engine = both_ways(monkeypatch, next_n, [1, 2, 3, 30, 61, 130], 24, **options)
        assert len(plain) == len(chosen) == 48
        assert all(torch.equal(a, b) for a, b in zip(chosen, plain, strict=True))
        assert {path for path, _ in integration.counters().calls} == {"gvr_topk"}
        assert any((row == -1).all() for rows in plain for row in rows)
        state = state_of(engine)
        long = state.requests.slot_of(6)
        assert ratio > 4 or (state.requests.words[:, long, 0] > 48).all()


@pytest.mark.parametrize("shape", BY_PHASE)
@pytest.mark.parametrize("topk, ratio", [(512, 4), (1024, 4), (512, 1), (1024, 1)])
def test_the_k_of_deepseek_v4(shape, monkeypatch, topk, ratio):
    lengths = [ratio * (topk + extra) + 1 for extra in (0, 3, 20)]
    with fake_package(shape, topk=topk):
        options = {"topk": topk, "layers": 1, "max_len": 4300, "compress_ratio": ratio}
        plain, chosen, _ = both_ways(monkeypatch, 1, lengths, 3, **options)
        assert all(torch.equal(a, b) for a, b in zip(chosen, plain, strict=True))
        assert (chosen[-1] >= 0).all() and chosen[-1].shape == (3, topk)
        assert integration.counters().calls == {("gvr_topk", "hint"): 3}


def test_any_number_of_draft_rows_of_compressed_keys(monkeypatch):
    """Rows without room for a slot run without a state."""
    for next_n, reason in ((32, "hint"), (33, "no_state")):
        with fake_package("trtllm_1_3_rc27"):
            plain, chosen, _ = both_ways(monkeypatch, next_n, [40], 2, compress_ratio=4)
            assert all(torch.equal(a, b) for a, b in zip(chosen, plain, strict=True))
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


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_that_reuse_a_choice_make_no_call_and_leave_the_state_alone(shape, monkeypatch):
    with fake_package(shape):
        options = {"layers": 6, "shared_layers": (1, 2, 4, 5)}
        plain, chosen, engine = both_ways(monkeypatch, 2, [30, 40, 50], 5, **options)
        assert all(torch.equal(a, b) for a, b in zip(chosen, plain, strict=True))
        assert integration.counters().calls == {("gvr_topk", "hint"): 10}
        words = state_of(engine).requests.words
        assert (words[[1, 2, 4, 5]] == -1).all() and (words[[0, 3], :3, 0] > 48).all()


@pytest.mark.parametrize("shape", ["trtllm_1_3_rc25", "trtllm_1_3_rc27"])
def test_draft_passes_that_share_a_choice_are_no_calls(shape, monkeypatch):
    """``index_share_for_mtp_iteration``: later draft passes reuse the first one's selection."""
    with fake_package(shape):
        engine = Engine(hooked(monkeypatch), layers=1)
        requests = [Request(i, 30, 99, seed=i, done=30) for i in (1, 2)]
        engine.metadata.set_in_mtp_draft_loop(True)
        (first,) = engine.step([], requests)
        engine.metadata.set_skip_topk(True)
        (second,) = engine.step([], requests)
        assert torch.equal(first, second)
        assert integration.counters().calls == {("gvr_topk", "hint"): 1}
        assert lines_of("warning") == []
