"""The logic of eval/engines/simulated_decode.py on the CPU, where the graph is an ordinary call."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from eval.__main__ import main
from eval.engines import simulated_decode
from gvr_topk.integrations._kit import environment

ARGUMENTS = [
    *("decode", "--device", "cpu", "--requests", "4"),
    *("--steps", "60", "--window", "700", "--topk", "64"),
]


@pytest.fixture
def script():
    threads = torch.get_num_threads()
    yield simulated_decode
    torch.set_num_threads(threads)


def test_hook_on_selects_the_same_sets(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(environment.OPTIONS, '{"stats": true}')
    target = tmp_path / "deep" / "result.json"
    assert main([*ARGUMENTS, "--out", str(target)]) == 0
    result = json.loads(target.read_text())
    assert json.loads(capsys.readouterr().out) == result
    sets, setup = result["sets"], result["setup"]
    assert sets["identical"] == sets["rows"] > 150 and sets["different"] == sets["other_ties"] == 0
    assert setup["arrivals"] > 4 and setup["finished"] > 0 and setup["graph_steps"] > 30
    (call,) = result["counters"]["calls"]
    assert (call["path"], call["reason"]) == ("gvr_topk", "hint")
    assert result["counters"]["requests"]["seeded"] == setup["arrivals"]
    assert result["counters"]["rows"]["hinted"] > 0
    assert 0.3 < result["counters"]["measured"]["hit_ratio"] < 1
    assert "not TensorRT-LLM itself" in result["what"]
    hook = result["hook_us"]
    assert all(0 < times["median"] <= times["p90"] for times in hook.values())
    steps = {kind: times["steps"] for kind, times in hook.items()}
    assert steps["same"] + steps["moved"] == setup["graph_steps"] and min(steps.values()) > 0
    assert sum(steps.values()) == setup["steps"]


def test_only_the_hook_is_timed_and_by_kind_of_step(script, monkeypatch):
    """The clock stands still but in the hook, where each step takes as long as its number says."""
    clock, taken = [0.0], []
    original = script.LayerHook._after_prepare

    def after_prepare(hook, metadata):
        original(hook, metadata)
        taken.append((metadata, tuple(metadata.request_ids)))
        clock[0] += len(taken)

    monkeypatch.setattr(script.LayerHook, "_after_prepare", after_prepare)
    monkeypatch.setattr(script.time, "perf_counter", lambda: 1e-6 * clock[0])
    options = script.Settings("cpu", None, 4, 60, 700, 64)
    found = script.run([script.shipped_trace()], options, "on")["hook_us"]
    kinds = {"same": [], "moved": [], "arrivals": []}
    for number, (before, now) in enumerate(itertools.pairwise(taken), 2):
        kind = "same" if before == now else "moved"
        kinds["arrivals" if now[0].num_contexts else kind].append(number)
    assert {kind: [round(us) for us in times] for kind, times in found.items()} == kinds
    numbers = [float(number) for number in range(100, 0, -1)]
    assert script.summary(numbers) == {"median": 50.5, "p90": 91, "steps": 100}


def test_a_wrong_set_is_found(script, monkeypatch, capsys):
    from gvr_topk.integrations.tensorrt_llm import hook as layer_hook

    def wrong(logits, seq_lens, k, *, out, **rest):
        out.copy_(torch.arange(k, dtype=torch.int32).expand_as(out))

    monkeypatch.setattr(layer_hook, "indexer_topk_decode", wrong)
    assert main(ARGUMENTS) == 1
    assert json.loads(capsys.readouterr().out)["sets"]["different"] > 100


def test_rows_grow_requests_change_and_every_run_sees_the_same(script):
    trace = script.shipped_trace()
    options = script.Settings("cpu", None, 4, 200, 700, 64)
    plan = script.schedule(trace, options)
    again = script.schedule(trace, options)
    assert [[a.request_id for a, _ in running] for running, _, _ in plan] == [
        [a.request_id for a, _ in running] for running, _, _ in again
    ]
    orders = {tuple(a.request_id for a, _ in running) for running, _, _ in plan}
    assert len(orders) > 10
    first = trace.length(0) - 1
    for running, _, _ in plan:
        assert len(running) <= options.requests
        for arrival, step in running:
            assert options.topk < first + step + 1 - arrival.shift <= options.window
            assert step < trace.steps
