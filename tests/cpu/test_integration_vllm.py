"""The vLLM integration on a fake of vLLM 0.33: what it computes, whose state it uses, and how it fails."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from edited_tree import edited
from prometheus_client import REGISTRY
from sampler_setup import fail
from vllm_engine import HERE, Runner, Step, fake_vllm
from vllm_lines import assert_exact, assert_prompts_exact, calls, prefill_op, register_with

from gvr_topk import policy
from gvr_topk.constants import STATE_UNKNOWN, STATE_VALUE_ONLY
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations._kit import counters as counters_module
from gvr_topk.integrations._kit import engine as engine_module
from gvr_topk.integrations._kit.engine import Engine
from gvr_topk.integrations.vllm import backend, plugin
from gvr_topk.integrations.vllm import hook as hook_module
from gvr_topk.integrations.vllm import prefill as prefill_module
from gvr_topk.integrations.vllm.hook import visible
from gvr_topk.integrations.vllm.plugin import Finder
from gvr_topk.integrations.vllm.prefill import PrefillCall, PrefillOp
from gvr_topk.integrations.vllm.rows import RequestStates, _prefilling, owners_of_rows
from gvr_topk.integrations.vllm.upstream import ENGINE, TOP_K_MODULE, WATCHED
from gvr_topk.library import LibraryStatus

ROOT = Path(__file__).resolve().parents[2]
FAKE = HERE / "vllm_0_33"
OURS = "gvr_topk"
OWN = "vLLM serves with its own top-k"


@pytest.fixture
def changed(log, tmp_path):
    """Make a copy of the fake in which texts are replaced: ``changed({file: (old, new)})``."""

    def change(edits):
        triples = [(f"vllm/{file}", *texts) for file, texts in edits.items()]
        return fake_vllm(edited(FAKE, tmp_path / "changed", triples))

    return change


def states(runner: Runner) -> RequestStates:
    found = plugin._integration.hook.state_of(runner.builder)
    assert found is not None
    return found


def serve(ours: bool = True, prompt: bool = False, **options) -> Runner:
    """Decode a request in a new runner, and beside it the prompt of another one where that is asked for."""
    runner = Runner(**options)
    step = runner.step([runner.add("a", 300)], [runner.add("b", 200)] if prompt else [])
    assert_exact(step, runner.topk, ours)
    if prompt:
        assert_prompts_exact(step, runner.topk, ours)
    return runner


def kth_values(step: Step, layer: str) -> torch.Tensor:
    """The least chosen score of each row, which is what the CPU implementation notes."""
    chosen = step.chosen[layer].to(torch.int64).clamp(min=0)
    return step.logits[layer].gather(1, chosen).amin(1)


def test_plain_decode_is_exact(serving, log):
    runner = Runner()
    requests = [runner.add(name, length) for name, length in (("a", 300), ("b", 399), ("c", 7))]
    with torch.inference_mode():
        for _ in range(3):
            assert_exact(runner.step(requests), runner.topk)
    assert calls() == {(OURS, "hint"): 6}
    assert [line.split(":")[0] for line in log] == ["gvr_topk in vLLM 0.33.0"] * 2
    assert log[0].endswith("state: 2 layers, 4 requests, 0.2 KiB on cpu")
    assert "on: decode top-k with k = 16, state of 2 layers" in log[1]


@pytest.mark.parametrize("via_op", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_state_follows_requests_through_churn(serving, via_op, inference):
    """More requests than places: they move between rows, and the place of one that ends goes to another."""
    runner = Runner(seqs=4, via_op=via_op, specials=False)
    live = []
    waiting = [(f"r{i}", 60 + 23 * i % 300) for i in range(12)]
    generator = torch.Generator().manual_seed(1)
    moved = 0
    with torch.inference_mode(inference):
        for number in range(40):
            starting = []
            while waiting and runner.free:
                starting.append(runner.add(*waiting.pop(0)))
            before = [request.place for request in live]
            step = runner.step(live, starting)
            assert_exact(step, runner.topk)
            if starting:
                assert_prompts_exact(step, runner.topk)
            kept = states(runner)
            for layer, name in enumerate(runner.names if live else ()):
                kth = kth_values(step, name)
                for row in range(len(live)):
                    slot = int(kept.slots.row_slot[row])
                    known, value = kept.slots.words[layer, slot, :2].tolist()
                    assert known == STATE_VALUE_ONLY
                    assert value == float(kth[row])
            live += starting
            order = torch.randperm(len(live), generator=generator).tolist()
            live = [live[i] for i in order]
            if number % 3 == 2 and live:
                runner.finish(live.pop())
            moved += any(old is not new for old, new in zip(before, live, strict=False))
    assert not waiting and moved > 20
    assert set(calls()) == {(OURS, "hint"), (OURS, "prefill")}
    assert integration.counters().requests["admitted"] == 12


def top_k(backend: str = "auto"):
    """VLLM's decode top-k, or ours in its place."""
    return importlib.import_module(TOP_K_MODULE).SparseIndexerTopk(backend)


def load_watched():
    """Import every module that is patched."""
    for name in WATCHED:
        importlib.import_module(name)


@pytest.mark.parametrize("via_op", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_prefill_is_exact(serving, log, via_op, inference):
    """Chunks of several prompts, rows shorter and longer than k, ties and NaN, beside decode rows."""
    runner = Runner(via_op=via_op)
    decoding, *prompts = (runner.add(f"of {length}", length) for length in (399, 300, 12, 20))
    with torch.inference_mode(inference):
        step = runner.step([], [decoding])
        assert_prompts_exact(step, runner.topk)
        step = runner.step([decoding], prompts)
    assert_exact(step, runner.topk)
    assert_prompts_exact(step, runner.topk)
    lengths = step.prompts.lengths.tolist()
    assert len(lengths) == 27 and min(lengths) < runner.topk < max(lengths)
    assert calls() == {(OURS, "hint"): 2, (OURS, "prefill"): 6}  # two layers; one chunk and then two
    assert sum(line.endswith("on: prefill top-k with k = 16") for line in log) == 1


def test_prefill_windows_that_begin_inside_the_scores(serving):
    """As the op may be called: positions count from the window, and a caller may name its arguments."""
    op = prefill_op()
    from vllm import _custom_ops

    logits = torch.randn(5, 90).round()
    starts = torch.tensor([0, 3, 50, 80, 20], dtype=torch.int32)
    ends = torch.tensor([90, 80, 55, 80, 90], dtype=torch.int32)
    wanted = torch.full((5, 8), -1, dtype=torch.int32)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        length = torch.tensor([end - start], dtype=torch.int32)
        wanted[row] = sorted_topk(logits[row : row + 1, start : max(end, start + 1)], length, 8)[0]
    out = torch.full((6, 11), 7, dtype=torch.int32)
    _custom_ops.top_k_per_row_prefill(logits, starts, ends, out[:5, :8], 5, 90, 1, 8)
    assert torch.equal(out[:5, :8], wanted) and out[:5, 8:].eq(7).all() and out[5].eq(7).all()
    named = {"rowStarts": starts, "rowEnds": ends, "numRows": 4, "stride0": 90, "stride1": 1, "topK": 8}
    op(logits, indices=out.fill_(7)[:, :8], **named)  # fewer rows than the tensors have
    assert torch.equal(out[:4, :8], wanted[:4]) and out[4:].eq(7).all()
    assert calls() == {(OURS, "prefill"): 2}
    assert op.default._schema.name == "_C::top_k_per_row_prefill"


def test_prefill_in_other_layouts_is_vllms(serving):
    """And nothing is switched off by them."""
    op, logits, out = prefill_op(), torch.randn(2, 128), torch.zeros((2, 8), dtype=torch.int32)
    starts, ends = torch.zeros(2, dtype=torch.int32), torch.tensor([64, 30], dtype=torch.int32)
    apart = logits[:, ::2]
    served = (logits, starts, ends, out, 2, 128, 1, 8)
    others = (
        (apart, starts, ends, out, 2, 128, 2, 8),
        (logits.double(), starts, ends, out, 2, 128, 1, 8),
        (logits, starts.long(), ends, out, 2, 128, 1, 8),
        (logits, starts, ends.long(), out, 2, 128, 1, 8),
        (logits, starts, ends.repeat_interleave(3)[::3], out, 2, 128, 1, 8),
        (logits, starts, ends, out.long(), 2, 128, 1, 8),
    )
    for arguments in (*others, served):
        arguments[3].zero_()
        op(*arguments)
        wanted = sorted_topk(arguments[0].float(), ends, 8)
        assert torch.equal(arguments[3].int().sort(1).values, wanted.sort(1).values)
    assert calls() == {("original", "prefill layout"): len(others), (OURS, "prefill"): 1}
    hook = plugin._integration.hook.prefill
    wide = torch.empty((1, 2**21 + 1), device="meta")
    for scores, rows, k in ((wide, 1, 8), (logits, 3, 8), (logits, 2, 9), (logits[0], 2, 8)):
        strides = (*scores.stride(), 1)[:2]
        assert hook.reason_against(PrefillCall(scores, starts, ends, out, rows, *strides, k)) == "layout"
    few = (logits[:1], starts, ends, out), (logits, starts[:1], ends, out), (logits, starts, ends, out[0])
    for tensors in few:
        assert hook.reason_against(PrefillCall(*tensors, 2, 128, 1, 8)) == "layout"
    assert hook.reason_against(PrefillCall(*served)) == ""


def test_prefill_op_that_has_changed(log, monkeypatch):
    """One transaction: decode is left alone, too."""
    __import__("vllm._custom_ops")
    monkeypatch.setattr(torch.ops._C, "top_k_per_row_prefill", torch.ops._C.renamed_top_k_per_row_prefill)
    integration.register()
    load_watched()
    assert prefill_op() is torch.ops._C.renamed_top_k_per_row_prefill
    assert len(log) == 1 and "refused: torch.ops._C.top_k_per_row_prefill" in log[0]
    assert "wanted logits, rowStarts, rowEnds" in log[0] and "cu_seqlen_ks" in log[0]
    assert not hasattr(top_k().forward, "__wrapped__")


def test_prefill_op_that_is_not_there(log, monkeypatch):
    """Decode is served all the same."""
    monkeypatch.setattr(plugin, "PREFILL", replace(plugin.PREFILL, name="torch.ops._C.top_k_of_another_name"))
    integration.register()
    runner = Runner()
    request = runner.add("a", 300)
    assert_prompts_exact(runner.step([], [request]), runner.topk, ours=False)
    assert_exact(runner.step([request]), runner.topk)
    assert calls() == {(OURS, "hint"): 2}
    assert sum("prefill top-k stays vLLM's own: wanted the op" in line for line in log) == 1


def test_rows_are_worked_out_when_the_batch_changes(serving, monkeypatch):
    runner = Runner(layers=1, drafts=1)
    first, second = runner.add("first", 100), runner.add("second", 120)
    runner.step([], [first, second])
    slots, worked_out = states(runner).slots, []
    set_rows = slots.set_rows
    monkeypatch.setattr(slots, "set_rows", lambda *given: worked_out.append(given) or set_rows(*given))

    def steps_that_were(batch, **named) -> int:
        before = len(worked_out)
        for _ in range(3):
            assert_exact(runner.step(batch, **named), runner.topk)
        return len(worked_out) - before

    assert steps_that_were([first, second]) == 1
    assert steps_that_were([second, first]) == 1
    assert steps_that_were([second, first], pads=1) == 1
    assert steps_that_were([first]) == 1
    second.rows = 1
    assert steps_that_were([first, second]) == 1
    assert steps_that_were([first], prefill=[second]) == 3
    place = second.place
    runner.finish(second)
    third = runner.add("third", 90)
    assert third.place == place
    runner.step([first], [third])
    assert steps_that_were([first, third]) == 1
    assert integration.counters().requests["admitted"] == 3


def test_a_step_without_drafts_is_no_start(serving):
    """A request with fewer rows than the first is among the prompts to vLLM, and keeps its slot."""
    runner = Runner(layers=1, drafts=1)
    first, second = runner.add("first", 100), runner.add("second", 120)
    runner.step([], [first, second])
    runner.step([first, second])
    slots = states(runner).slots.row_slot[:4].tolist()
    second.rows = 1
    step = runner.step([first, second])
    assert step.lengths.shape == (2,) and states(runner).slots.row_slot[:3].tolist() == [*slots[:2], -1]
    second.rows = None
    assert_exact(runner.step([first, second]), runner.topk)
    assert states(runner).slots.row_slot[:4].tolist() == slots
    assert integration.counters().requests["admitted"] == 2


def test_a_cached_prompt_is_a_start(serving):
    """Its last token is a decode row, at a place that another request had."""
    runner = Runner(layers=1)
    first = runner.add("first", 100)
    runner.step([], [first])
    runner.step([first])
    runner.finish(first)
    second = runner.add("second", 80)
    assert second.place == first.place
    step = runner.step([second])
    assert_exact(step, runner.topk)
    assert integration.counters().requests["admitted"] == 2
    runner.step([second])
    assert integration.counters().requests["admitted"] == 2


def test_chunks_of_a_prompt_that_are_decode_rows_are_one_start(serving):
    """Where a step has room for one more token, a chunk is one row, which vLLM counts among the decodes."""
    runner = Runner(layers=1, specials=False)
    request = runner.add("a", 100)
    for _ in range(3):
        request.prompted = False
        step = runner.step([request])
        slot = int(states(runner).slots.row_slot[0])
        assert float(states(runner).slots.words[0, slot, 1]) == float(kth_values(step, runner.names[0])[0])
        assert integration.counters().requests["admitted"] == 1
    runner.step([request])
    assert int(states(runner).slots.row_slot[0]) == slot
    assert integration.counters().requests["admitted"] == 1
    runner.finish(request)
    other = runner.add("b", 90)
    assert other.place == request.place
    runner.step([other])
    assert integration.counters().requests["admitted"] == 2


@pytest.mark.parametrize("prompts", [0, 2])
def test_a_batch_without_places_leaves_the_state_alone(serving, prompts):
    """As a draft model's; the batches before and after it are not affected."""
    runner = Runner(layers=1, specials=False)
    request = runner.add("a", 100)
    runner.step([request])
    kept = states(runner).slots
    slot, words = int(kept.row_slot[0]), kept.words.clone()
    assert slot >= 0
    starting = [runner.add(name, 50) for name in "bc"[:prompts]]
    runner.v2 = False  # the batch has no places
    for _ in range(2):
        assert_exact(runner.step([request], starting), runner.topk)
        assert kept.row_slot.tolist() == [-1] * 8 and torch.equal(kept.words, words)
    runner.v2 = True
    step = runner.step([request])
    assert int(kept.row_slot[0]) == slot
    assert float(kept.words[0, slot, 1]) == float(kth_values(step, runner.names[0])[0])
    assert set(calls()) - {(OURS, "prefill")} == {(OURS, "hint")}
    assert integration.counters().requests["admitted"] == 1


def test_a_layer_is_forgotten_when_its_indexer_returns(serving):
    """A top-k that a layer did not ask for is not taken for the one of the last layer."""
    runner = Runner(layers=1)
    request = runner.add("a", 100)
    runner.step([request])
    hint = calls()[OURS, "hint"]
    runner.step([], [runner.add("b", 90)])  # no decode row, so the indexer calls no top-k for decode
    metadata = runner.prepare([request])
    words = states(runner).slots.words.clone()
    ends, out = metadata.decode.seq_lens, torch.empty((1, 16), dtype=torch.int32)
    with runner.context.set_forward_context({runner.names[0]: metadata}):
        top_k()(torch.randn(1, 400), ends, 1, out, 16, 100)
    assert calls()[OURS, "no_state"] == 1 and calls()[OURS, "hint"] == hint
    assert torch.equal(states(runner).slots.words, words)


def test_prompts_where_vllm_does_not_say():
    """Without flags, or with flags that would have to be read from the device, the split has to do."""
    flags = torch.tensor([True, False, True])
    assert _prefilling(SimpleNamespace(is_prefilling=flags), 3, 2) == [True, False, True]
    for unknown in (None, torch.empty(3, device="meta"), flags[:2]):
        assert _prefilling(SimpleNamespace(is_prefilling=unknown), 3, 2) == [False, False, True]
    assert _prefilling(SimpleNamespace(), 3, 0) == [True] * 3


def test_graphs_are_captured_with_the_tensors_of_later_steps(serving):
    """A batch whose places are no requests' still takes the state, for what a graph captures stays in it."""
    runner = Runner(layers=1)
    runner.dummy(3)
    runner.step(runner.dummies(3, 200))  # with keys, as if they had run before
    assert integration.counters().requests["admitted"] == 0
    kept = states(runner)
    address = kept.slots.row_slot.data_ptr()
    assert kept.slots.row_slot.tolist() == [-1] * 8 and calls() == {(OURS, "hint"): 2}
    assert bool((kept.slots.words[:, :, 0] == STATE_UNKNOWN).all())
    runner.step([runner.add("a", 99)])
    assert kept.slots.row_slot.data_ptr() == address and int(kept.slots.row_slot[0]) >= 0


@pytest.mark.parametrize("flattening", [False, True])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts(serving, flattening, drafts):
    runner = Runner(drafts=drafts, flattening=flattening, specials=False)
    requests = [runner.add("a", 300), runner.add("b", 21), runner.add("c", 2)]
    for number in range(3):
        step = runner.step(requests, pads=number % 2)
        assert_exact(step, runner.topk)
        slots = states(runner).slots.row_slot[: 3 * (1 + drafts)].view(3, 1 + drafts)
        assert len(set(slots[:, -1].tolist())) == 3 and int(slots.min()) >= (-1 if flattening else 0)
        if flattening:  # rows that are requests of their own would all write the slot
            assert slots[:, :-1].eq(-1).all()
        else:
            assert slots.eq(slots[:, -1:]).all()
        kth = kth_values(step, runner.names[0]).view(-1, 1 + drafts)[:2, -1]
        words = states(runner).slots.words[0, slots[:2, -1].long(), 1]
        assert torch.equal(words, kth)
        requests.reverse()
        requests = sorted(requests, key=lambda request: request.length, reverse=True)
    assert set(calls()) == {(OURS, "hint")}


@pytest.mark.parametrize("lengths", ["rows", "column", "requests"])
def test_every_layout_of_lengths(serving, lengths):
    logits = torch.randn(6, 64)
    by_row = torch.tensor([[39, 40], [4, 5], [63, 64]], dtype=torch.int32)
    given = {"rows": by_row, "column": by_row.reshape(-1, 1), "requests": by_row[:, 1].contiguous()}[lengths]
    out = torch.zeros((6, 10), dtype=torch.int32)[:, :8]
    top_k()(logits, given, 1 if lengths == "column" else 2, out, 8, 64)
    assert torch.equal(out, sorted_topk(logits, by_row.reshape(-1), 8))
    assert calls() == {(OURS, "no_state"): 1}


def test_requests_with_fewer_drafts_than_others_leave_no_state():
    assert owners_of_rows([7, 3], [2, 1], (2, 2)) == ([7, None], 2)
    assert owners_of_rows([7, 3], [2, 1], (3, 1)) == ([None, 7, 3], 1)
    assert owners_of_rows([7, 3], [1, 1], (2, 1)) == ([7, 3], 1)
    assert owners_of_rows([7, 3], [2, 2], (3, 2)) == ([], 2)  # unknown to us
    assert owners_of_rows([7], [3], (2, 1)) == ([], 1)


@pytest.mark.parametrize(
    ("seqs", "drafts", "pieces", "rows"),
    [
        (4, 0, {}, 8),  # the fake captures graphs of up to 8 rows
        (4, 1, {}, 8),
        (4, 3, {}, 16),
        (3, 2, {}, 9),
        (9, 0, {}, 9),
        (4, 0, {"compilation_config": None}, 4),
        (4, 3, {"speculative_config": SimpleNamespace(num_speculative_tokens=None)}, 8),
        (4, 3, {"compilation_config": None, "speculative_config": None}, 4),
    ],
)
def test_room_is_for_the_longest_batch_or_graph(serving, seqs, drafts, pieces, rows):
    runner = Runner(layers=3, seqs=seqs, drafts=drafts)
    for name, value in pieces.items():
        setattr(runner.builder.vllm_config, name, value)
    runner.prepare([runner.add("a", 50)])
    kept = states(runner).slots
    assert (*kept.words.shape[:2], len(kept.row_slot)) == (3, seqs, rows)


@pytest.mark.parametrize(("drafts", "most"), [(0, 8), (3, 4)])
def test_more_rows_than_there_is_room_for(serving, log, drafts, most):
    """A longer batch goes without state, and so do no others."""
    runner = Runner(seqs=4, drafts=drafts)
    for count in (most, most + 1, most + 1, most):
        rows = runner.prepare(runner.dummies(count)).gvr_topk_rows
        assert (rows is None) == (count > most)
    runner.dummy(most + 1)
    assert calls() == {(OURS, "no_state"): 2}
    assert_exact(runner.step([runner.add("a", 50)]), runner.topk)
    assert calls()[OURS, "hint"] == 2
    assert not any("without state from now on" in line for line in log)


def test_v1_runner_has_no_state(serving, log):
    runner = Runner(v2=False)
    requests = [runner.add("a", 300), runner.add("b", 30)]
    for _ in range(2):
        assert_exact(runner.step(requests), runner.topk)
    assert calls() == {(OURS, "no_state"): 4}
    assert plugin._integration.hook.state_of(runner.builder) is None
    assert "without state: this model runner does not say which request" in log[0]


@pytest.mark.parametrize("share", [1, 4])
def test_an_indexer_of_a_models_own_is_served_without_state(log, share):
    """GLM-5-Next scores pools of keys, and calls both top-k's itself with outputs of its own.

    The layer is not named to us, the outputs are not filled with -1 before, and the longest length is that of
    the keys and not of the pools.
    """
    importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    integration.register()
    k = 32 // share
    pools = torch.tensor([[4], [31], [90 // share]], dtype=torch.int32)
    logits = torch.randn(3, 100)
    chosen = torch.full((3, k), 77, dtype=torch.int32)
    top_k()(logits, pools, 1, chosen, k, 100 * share)
    assert torch.equal(chosen, sorted_topk(logits, pools.reshape(-1), k))
    ends = pools.reshape(-1)
    prompts = torch.full((3, k), 77, dtype=torch.int32)
    torch.ops._C.top_k_per_row_prefill(
        logits, torch.zeros_like(ends), ends, prompts, 3, logits.stride(0), logits.stride(1), k
    )
    assert torch.equal(prompts, chosen)
    assert calls() == {(OURS, "no_state"): 1, (OURS, "prefill"): 1}


@pytest.mark.parametrize("force", [False, True])
def test_a_model_that_asks_for_an_exact_backend_keeps_it(log, monkeypatch, force):
    """Step5 takes ``per_row`` where the setting is ``auto``, as the other kernels are not exact to it."""
    register_with(monkeypatch, GVR_TOPK_VLLM="force" if force else "1")
    scores = torch.randn(2, 60)
    chosen = torch.empty((2, 8), dtype=torch.int32)
    lengths = torch.tensor([60, 41], dtype=torch.int32)  # one-dimensional there
    top_k("per_row")(scores, lengths, 1, chosen, 8, 60)
    wanted = sorted_topk(scores, lengths, 8)
    assert torch.equal(chosen.sort(1).values, wanted)
    assert calls() == ({(OURS, "no_state"): 1} if force else {("original", "backend chosen"): 1})


def test_chosen_backend_is_respected(serving, log):
    serve(ours=False, prompt=True, backend="persistent")
    assert calls() == {("original", "backend chosen"): 2, ("original", "prefill backend chosen"): 2}
    lines = [line.partition("not in use: ")[2] for line in log]
    assert sum(line.startswith("sparse_indexer_topk_backend is 'persistent'") for line in lines) == 1
    assert sum(line.startswith("prefill, for sparse_indexer_topk_backend is") for line in lines) == 1


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("GVR_TOPK_DISABLE", "1", "off: GVR_TOPK_DISABLE is set"),
        ("GVR_TOPK_VLLM", "0", "off: GVR_TOPK_VLLM=0"),
        ("GVR_TOPK_VLLM", "drafts", "refused: GVR_TOPK_VLLM: wanted 0, 1 or force, got 'drafts'"),
        ("GVR_TOPK_VERIFY", "all", f"refused: GVR_TOPK_VERIFY: wanted a number of calls, got 'all'. {OWN}"),
    ],
)
def test_switches(log, monkeypatch, name, value, line):
    register_with(monkeypatch, **{name: value})
    serve(ours=False, prompt=True)
    assert not isinstance(prefill_op(), PrefillOp)
    assert len(log) == 1 and line in log[0]
    assert calls() == {} and Finder not in sys.meta_path


def test_no_library(log, monkeypatch):
    monkeypatch.setattr(engine_module, "library_status", lambda: LibraryStatus(False, None, "not built"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    integration.register()
    serve(ours=False)
    assert log == [f"gvr_topk in vLLM 0.33.0: refused: the CUDA library is not usable: not built. {OWN}"]


def test_gpu_without_code(log, monkeypatch):
    """CUDA is initialized before a module is patched; otherwise calls of each kind would fail."""
    for name, value in (("is_initialized", 1), ("is_available", 1), ("get_device_capability", (8, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(policy, "library_status", lambda: LibraryStatus(True, None, ""))
    integration.register()
    serve(ours=False, prompt=True)
    assert len(log) == 1 and "refused: wanted a GPU that the library holds code for (" in log[0]
    assert log[0].endswith(f"got compute capability 8.0. {OWN}")


def test_unknown_version(changed, log, monkeypatch):
    with changed({"version.py": ("0.33.0", "0.34.1")}):
        integration.register()
        assert len(log) == 1 and "refused: wanted vLLM 0.33, got 0.34.1" in log[0]
        register_with(monkeypatch, GVR_TOPK_VLLM="force")
        serve()


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.33.0", True), ("0.33.2+cu130", True), ("0.33.0rc1", True), ("0.3.3", False), ("1.33.0", False)],
)
def test_versions(version, known):
    assert ENGINE.knows(version) is known


TOPK_FILE = "model_executor/layers/indexer_topk.py"
BUILDER_FILE = "v1/attention/backends/mla/indexer.py"


@pytest.mark.parametrize(
    ("edits", "detail"),
    [
        (
            {TOPK_FILE: ("next_n: int,\n        topk_indices", "topk_indices")},
            "wanted self, logits, seq_lens",
        ),
        ({TOPK_FILE: ("max_seq_len: int,", "max_seq_len: int, page_table,")}, "page_table"),
        ({TOPK_FILE: ("    def forward(", "    def run(")}, "SparseIndexerTopk.forward"),
        ({TOPK_FILE: ("SparseIndexerTopk", "IndexerTopk")}, "wanted a class SparseIndexerTopk"),
        ({BUILDER_FILE: ("common_prefix_len: int", "prefix: int")}, "wanted self, common_prefix_len"),
        ({BUILDER_FILE: ("    def build(", "    def make(")}, "wanted a method build"),
    ],
)
def test_unlike_sources_are_left_alone(changed, log, edits, detail):
    """Whatever was patched before is taken back."""
    with changed(edits):
        integration.register()
        load_watched()
        assert len(log) == 1 and detail in log[0] and "refused" in log[0]
        from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer
        from vllm.models.deepseek_v32 import attention

        assert not hasattr(attention.sparse_attn_indexer, "__wrapped__")
        assert not hasattr(sparse_attn_indexer._resolve_layer_name, "__wrapped__")
        stage = getattr(indexer_topk, "SparseIndexerTopk", None)
        assert not hasattr(getattr(stage, "forward", None), "__wrapped__")


def test_layers_that_cannot_be_told_have_no_state(changed):
    edits = {
        "model_executor/layers/sparse_attn_indexer.py": ("_resolve_layer_name", "resolve_layer"),
        "utils/torch_utils.py": ("_resolve_layer_name", "resolve_layer"),
    }
    with changed(edits):
        integration.register()
        serve(via_op=True)
        assert calls() == {(OURS, "no_state"): 2}
        direct = Runner()  # a model that calls the function itself
        assert_exact(direct.step([direct.add("a", 300)]), direct.topk)
        assert calls()[OURS, "hint"] == 2


def test_broken_metadata_costs_the_state_alone(changed, log):
    with changed({"v1/attention/backend.py": ("        self.device = device\n", "")}):
        integration.register()
        runner = serve()
        assert calls() == {(OURS, "no_state"): 2}
        assert "without state from now on: LookupError: DeepseekV32IndexerMetadataBuilder()" in log[0]
        runner.builder.device = torch.device("cpu")  # too late: what was missed is not made up for
        assert_exact(runner.step([runner.add("b", 300)]), runner.topk)
        assert plugin._integration.hook.state_of(runner.builder) is None
        assert calls() == {(OURS, "no_state"): 4}


OPS = pytest.mark.parametrize(
    ("module", "op", "kind"),
    [(hook_module, "indexer_topk_decode", ""), (prefill_module, "indexer_topk_prefill", "prefill ")],
)


@OPS
def test_an_op_that_fails_falls_back_alone_and_for_good(serving, log, monkeypatch, module, op, kind):
    runner = Runner()
    request = runner.add("a", 300)
    assert_exact(runner.step([request]), runner.topk)
    monkeypatch.setattr(module, op, fail)
    for prompt in "bc":
        step = runner.step([request], [runner.add(prompt, 200)])
        assert_exact(step, runner.topk, ours=kind != "")
        assert_prompts_exact(step, runner.topk, ours=kind == "")
        monkeypatch.undo()
    served = {(OURS, "prefill"): 4, (OURS, "hint"): 2} if kind == "" else {(OURS, "hint"): 6}
    assert calls() == served | {("original", f"{kind}error: RuntimeError"): 4}
    (line,) = [line for line in log if "fell back" in line]
    assert f"fell back: {kind.replace(' ', ': ')}RuntimeError: no room for this launch" in line


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_first_calls_are_verified(log, monkeypatch, drafts):
    register_with(monkeypatch, GVR_TOPK_VERIFY="3")
    runner = Runner(drafts=drafts)
    request, prompt = runner.add("a", 300), runner.add("b", 200)
    for _ in range(3):
        step = runner.step([request], [prompt])
        assert_exact(step, runner.topk)
        assert_prompts_exact(step, runner.topk)
    verified = [line.partition(": ")[2] for line in log if "verified" in line]
    assert sorted(verified) == ["verified 3 calls of decode top-k", "verified 3 calls of prefill top-k"]
    assert calls() == {(OURS, "hint"): 6, (OURS, "prefill"): 6}


@OPS
def test_an_op_that_is_wrong_is_noticed(log, monkeypatch, module, op, kind):
    """And without GVR_TOPK_VERIFY it is not."""
    monkeypatch.setattr(module, op, lambda *args, out, **kwargs: out.fill_(0))
    integration.register()
    runner = Runner()
    runner.step([runner.add("a", 300)], [runner.add("b", 200)])
    assert {path for path, _ in calls()} == {OURS}
    log.clear()
    register_with(monkeypatch, GVR_TOPK_VERIFY="8")
    runner = Runner()
    request, prompt = runner.add("a", 300), runner.add("b", 200)
    for _ in range(3):
        step = runner.step([request], [prompt])
        assert_exact(step, runner.topk, ours=kind != "")
        assert_prompts_exact(step, runner.topk, ours=kind == "")
    (line,) = [line for line in log if "fell back" in line]
    assert "Differs: row " in line and "an item is selected twice" in line
    assert line.endswith(f". vLLM's own {kind}top-k serves from now on")
    assert calls()["original", f"{kind}error: Differs"] == 6


@pytest.mark.parametrize("arch", [90, 100, 103])
@pytest.mark.parametrize("resolved", ["cooperative", "flashinfer_gvr2"])
@pytest.mark.parametrize("mode", ["1", "force"])
def test_auto_that_is_another_gvr_is_left_alone(log, monkeypatch, arch, resolved, mode):
    """On Blackwell alone; the prefill top-k is no such one there."""
    monkeypatch.setattr(backend, "arch_of", lambda device: arch)
    register_with(monkeypatch, GVR_TOPK_VLLM=mode)
    runner = Runner()
    stage = type(top_k())
    monkeypatch.setattr(stage, "resolve_backend", lambda stage, logits, topk_tokens, num_rows: resolved)
    step = runner.step([runner.add("a", 300)], [runner.add("b", 200)])
    left = arch >= 100 and "gvr" in resolved and mode == "1"
    assert_exact(step, runner.topk, ours=not left)
    assert_prompts_exact(step, runner.topk)
    decode = {("original", "native GVR"): 2} if left else {(OURS, "hint"): 2}
    assert calls() == {**decode, (OURS, "prefill"): 2}
    said = [line.partition("not in use: ")[2] for line in log if "not in use" in line]
    what = "sparse_indexer_topk_backend 'auto' is 'flashinfer_gvr2' here, a top-k of the same kind"
    assert said == [f"{what}; GVR_TOPK_VLLM=force runs gvr_topk instead"] * left


def test_other_layouts_are_vllms(serving):
    """And nothing is switched off by them."""
    logits = torch.randn(1, 128)
    lengths = torch.tensor([[64]], dtype=torch.int32)
    for scores, ends in ((logits[:, ::2], lengths), (logits, lengths.long()), (logits, lengths)):
        out = torch.zeros((1, 8), dtype=torch.int32)
        top_k()(scores, ends, 1, out, 8, 64)
        assert torch.equal(out.sort(1).values, sorted_topk(scores, ends.reshape(-1), 8))
    assert calls() == {("original", "layout"): 2, (OURS, "no_state"): 1}


def test_register_twice_is_once(serving):
    runner, hook = Runner(), plugin._integration.hook
    integration.register()
    assert plugin._integration.hook is hook
    assert not hasattr(top_k().forward.__wrapped__, "__wrapped__")
    assert sys.meta_path.count(Finder) == 1
    assert_exact(runner.step([runner.add("a", 300)]), runner.topk)
    assert calls() == {(OURS, "hint"): 2}


def test_modules_that_are_loaded_before_are_patched_and_restored(log):
    load_watched()
    from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer
    from vllm.models.deepseek_v32 import attention
    from vllm.v1.attention.backends.mla import indexer

    def patched():
        return (
            indexer_topk.SparseIndexerTopk.forward,
            sparse_attn_indexer._resolve_layer_name,
            attention.sparse_attn_indexer,
            indexer.DeepseekV32IndexerMetadataBuilder.build,
            prefill_op(),
        )

    before = patched()
    integration.register()
    assert all(a is not b for a, b in zip(before, patched(), strict=True))
    serve()
    assert calls() == {(OURS, "hint"): 2}
    integration.unregister()
    assert all(a is b for a, b in zip(before, patched(), strict=True)) and Finder not in sys.meta_path


def test_register_never_raises(log, monkeypatch):
    monkeypatch.setattr(Engine, "outlook", Mock(side_effect=OSError("odd")))
    with monkeypatch.context() as without:
        without.setattr(sys, "path", [path for path in sys.path if path != str(FAKE)])
        integration.register()
    assert log == [
        "gvr_topk in vLLM of unknown version: refused: OSError: odd. vLLM serves with its own top-k"
    ]


def test_register_imports_nothing_of_vllm_and_no_cuda():
    program = (
        "import sys, torch\n"
        f"sys.path[:0] = [{str(FAKE)!r}]\n"
        "from gvr_topk.integrations.vllm import register\n"
        "register()\n"
        "print(torch.cuda.is_initialized(), [name for name in sys.modules if name.startswith('vllm')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("False []\n", "")


@pytest.mark.parametrize(("dtype", "vector"), [(torch.float32, 4), (torch.bfloat16, 8)])
def test_columns_that_no_row_reaches_are_left_out(monkeypatch, dtype, vector):
    """In whole vectors, and not where a graph is captured, whose later rows may be longer."""
    logits = torch.zeros((2, 400), dtype=dtype)
    widths = {0: vector, 1: vector, vector: vector, vector + 1: 2 * vector, 399: 400, 5000: 400}
    for longest, width in widths.items():
        seen = visible(logits, longest)
        assert seen.shape == (2, width) and seen.stride() == (400, 1)
    monkeypatch.setattr(hook_module, "capturing", lambda device: True)
    assert visible(logits, 10).shape == (2, 400)


def test_metric_in_vllms_registry(log, monkeypatch, tmp_path):
    register_with(monkeypatch, GVR_TOPK_VLLM_METRICS_DIR=str(tmp_path))
    runner = Runner()
    request = runner.add("a", 300)
    runner.step([request])
    runner.step([request])
    labels = {"path": OURS, "reason": "hint"}
    assert REGISTRY.get_sample_value("gvr_topk_calls_total", labels) == 4
    assert 'gvr_topk_calls_total{path="gvr_topk",reason="hint"} 4.0' in integration.prometheus_text()
    (file,) = tmp_path.glob(f"gvr_topk_*_{os.getpid()}_*.prom")
    assert "gvr_topk_requests_total" in file.read_text()
    integration.unregister()
    assert REGISTRY.get_sample_value("gvr_topk_calls_total", labels) is None


def test_metrics_that_cannot_be_kept_cost_nothing_else(log, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GVR_TOPK_VLLM_METRICS_DIR", str(tmp_path / "file" / "missing"))
    monkeypatch.setattr(plugin.CallMetrics, "open", Mock(side_effect=ValueError("taken")))
    integration.register()
    serve()
    assert "no metric in vLLM's registry: taken" in log[0]
    assert any("no metrics file: NotADirectoryError" in line for line in log)
    assert calls() == {(OURS, "hint"): 2}


def test_a_metric_whose_file_fails_is_given_up(serving, log, monkeypatch):
    """Several API servers share files, and a folder may go or be full while calls are served."""
    no_file = Mock(side_effect=OSError("no space left"))
    monkeypatch.setattr(plugin._integration.metrics._metric, "labels", no_file)
    serve()
    assert calls() == {(OURS, "hint"): 2}
    (line,) = [line for line in log if "no metric of calls from now on" in line]
    assert line.endswith("OSError: no space left")


def test_the_metrics_file_goes_on_behind_an_error(serving, monkeypatch, tmp_path):
    monkeypatch.setenv("GVR_TOPK_VLLM_METRICS_DIR", str(tmp_path))
    monkeypatch.setattr(counters_module, "WRITE_INTERVAL", 0.0)
    runner = Runner()
    request = runner.add("a", 300)
    runner.step([request])
    monkeypatch.setattr(hook_module, "indexer_topk_decode", fail)
    for _ in range(3):
        runner.step([request])
    (file,) = tmp_path.glob("*.prom")
    assert 'path="original",reason="error: RuntimeError"' in file.read_text()


@pytest.fixture
def installed(tmp_path):
    """The entry point as the wheel declares it, read from pyproject.toml."""
    declared = (
        (ROOT / "pyproject.toml").read_text().split('[project.entry-points."vllm.general_plugins"]\n')[1]
    )
    folder = tmp_path / "site" / "gvr_topk_fake-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gvr-topk-fake\nVersion: 1\n")
    line = declared.split("\n")[0].replace('"', "")
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{line}\n")
    sys.path.insert(0, str(folder.parent))
    yield
    sys.path.remove(str(folder.parent))


def test_entry_point(installed):
    from importlib.metadata import entry_points

    found = entry_points(group="vllm.general_plugins", name="gvr_topk")
    assert {entry.load() for entry in found} == {integration.register}


def test_doctor(log, installed, monkeypatch):
    rows = dict(integration.describe())
    assert rows["vLLM"].startswith(f"0.33.0 in {FAKE}")
    assert rows["entry point"] == "gvr_topk = gvr_topk.integrations.vllm:register in vllm.general_plugins"
    assert rows["SparseIndexerTopk.forward"].startswith("ok: wrapped")
    later = "later (checked when its library is loaded): replaced: runs our op"
    assert rows["torch.ops._C.top_k_per_row_prefill"].startswith(later)
    assert rows["sparse_attn_indexer"].startswith("ok: wrapped")
    others = ", and candidate blocks, and scores of long prompts"
    others += ", and log-probabilities, and the sampler, and drafts, and masks"
    auto = "decode and prefill top-k are replaced where sparse_indexer_topk_backend is auto"
    assert rows["would happen"] == auto + others
    assert not [name for name in sys.modules if name.startswith("vllm.")]
    monkeypatch.setenv("GVR_TOPK_VLLM", "force")
    outlook = dict(integration.describe())["would happen"]
    assert outlook.endswith(f"are replaced whatever sparse_indexer_topk_backend says{others}")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    rows = dict(integration.describe())
    assert rows["entry point"] == "not loaded: VLLM_PLUGINS=other has to name gvr_topk, too"
    assert rows["would happen"] == "nothing: vLLM does not find the entry point"
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    assert dict(integration.describe())["would happen"] == "nothing: GVR_TOPK_DISABLE is set"


@pytest.mark.parametrize(
    "edits",
    [
        {TOPK_FILE: ("    def forward(", "    def run(")},
        {"model_executor/layers/sparse_attn_indexer.py": ("def sparse_attn_indexer(", "def indexer(")},
        {"model_executor/layers/sparse_attn_indexer.py": ("k_cache_prefix: LayerName", "name: LayerName")},
    ],
)
def test_doctor_names_what_is_unlike(changed, installed, edits):
    with changed(edits):
        rows = dict(integration.describe())
        assert rows["would happen"].startswith("nothing: ") and "wanted" in rows["would happen"]
