"""What the host time of a call is measured over, and what is written."""

import json
from pathlib import Path

import torch
from eval_fakes import run_verb

from eval.bench import host
from eval.bench.kernel_timing import Chain
from gvr_topk.evaluation.oracle import sorted_topk


def test_every_way_to_call_selects_the_same() -> None:
    chain = Chain(torch.randn(1, 2, 300), torch.full((2,), 300, dtype=torch.int32), 16, lead=0)
    calls = host.our_calls(chain)
    ways = ["hinted", "bare", "every_output", "dispatcher", "topk", "unsorted", "torch_topk", "zero_"]
    assert list(calls) == ways
    chosen = [calls[name]() for name in ("hinted", "bare", "every_output")]
    expected = sorted_topk(chain.logits[0], chain.lengths, chain.k)
    assert all(torch.equal(each, expected) for each in chosen)
    assert calls["dispatcher"]() is None
    assert torch.equal(calls["unsorted"]().indices, expected)
    assert torch.equal(calls["topk"]().values, calls["torch_topk"]().values)


def test_command_writes_figures_and_where_they_come_from(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    options = ("--length", "64", "--calls", "3", "--out", str(out), "--commit", "abc")
    done = run_verb("host", "--device", "cpu", *options)
    assert done.exit_code == 0, done.output
    data = json.loads(out.read_text())
    assert (data["format"], data["machine"]["commit"]) == (host.FORMAT, "abc")
    assert (data["n"], data["batch"], data["k"], data["calls"]) == (64, 1, 64, 3)
    measured = {result["call"]: result for result in data["results"]}
    assert {"hinted", "bare", "dispatcher", "zero_", "torch"} <= set(measured)
    assert all(len(result["turns_us"]) == host.TURNS for result in data["results"])
    assert data["baselines"]["trtllm"]["why_not"] and "trtllm" not in measured
    assert "hinted" in done.output and "trtllm: " in done.output
