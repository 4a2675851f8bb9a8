"""``python -m eval vllm-trial``: what it would run, what it counts, and when nothing was shown."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))

from vllm_engine import Runner, fake_vllm

from eval import vllm_trial
from eval.__main__ import main
from eval.common import vllm_engine
from eval.common.evidence import read_evidence
from eval.common.process import CommandError
from eval.common.vllm_engine import COMPARE, FULL, OURS, STOCK, Comparison, Specification
from eval.common.vllm_model import TOPK, matrices, model_config, vectors, write_model
from gvr_topk.integrations import vllm as integration

ON = "INFO gvr_topk in vLLM 0.33.0: on: decode top-k with k = 2048, state of 4 layers"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.delenv("GVR_TOPK_DISABLE", raising=False)
    yield
    integration.unregister()


def specification(mode: str = COMPARE, **changes) -> Specification:
    plain = {
        "mode": mode,
        "graphs": "eager",
        "drafts": 0,
        "model": "folder",
        "load_format": "auto",
        "batches": [1, 3],
        "lengths": [300],
        "steps": 6,
        "churn": True,
        "max_model_len": 400,
        "memory": 0.5,
    }
    return Specification(**(plain | changes))


class FakeEngine:
    """Answers as vLLM's engine does, and runs the indexer layers of the fake for what decodes."""

    def __init__(self, seqs: int) -> None:
        self.runner = Runner(seqs=seqs)
        self.waiting: list = []
        self.live: list = []

    def add_request(self, name, prompt, parameters) -> None:
        assert all(10 <= token < 32000 for token in prompt["prompt_token_ids"])
        self.waiting.append((name, len(prompt["prompt_token_ids"]), parameters.max_tokens))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.live)

    def step(self) -> list:
        starting = []
        while self.waiting and self.runner.free:
            name, length, tokens = self.waiting.pop(0)
            starting.append([self.runner.add(name, min(length, 380)), 0, tokens])
        self.runner.step([request for request, *_ in self.live], [request for request, *_ in starting])
        self.live += starting
        outputs = []
        for item in self.live:
            item[1] += 1
            tokens = SimpleNamespace(token_ids=list(range(item[1])))
            outputs.append(SimpleNamespace(request_id=item[0].name, outputs=[tokens]))
        for item in [item for item in self.live if item[1] == item[2]]:
            self.live.remove(item)
            self.runner.finish(item[0])
        return outputs


@pytest.fixture
def vllm():
    with fake_vllm():
        package = importlib.import_module("vllm")
        package.__version__ = "0.33.0"
        package.SamplingParams = SimpleNamespace
        package.LLM = lambda **given: SimpleNamespace(llm_engine=FakeEngine(given["max_num_seqs"]))
        yield package


def test_missing_package_is_one_line(capsys):
    assert main(["vllm-trial"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "wanted the package vllm 0.33, got none: pip install 'gvr-topk[vllm]'" in said.err


@pytest.mark.parametrize("option", [["--modes", "fast"], ["--batches", "0"], ["--lengths", "8k"]])
def test_wrong_options(option, capsys):
    assert main(["vllm-trial", *option]) == 2
    assert "wanted" in capsys.readouterr().err


def test_plan():
    options = vllm_trial.parse_args(["--work", "w"])
    plan = vllm_trial.plan(options)
    assert len({spec.name for spec in plan}) == len(plan) == 12
    assert {spec.batches[-1] for spec in plan} == {96} and plan[0].mode == STOCK
    assert {(spec.model, spec.load_format, spec.drafts) for spec in plan} == {
        ("w/plain", "auto", 0),
        ("w/drafts", "dummy", 1),
    }


def test_engine_arguments():
    eager = vllm_engine.engine_arguments(specification())
    assert eager["enforce_eager"] and eager["max_num_seqs"] == 3 and "speculative_config" not in eager
    graphs = vllm_engine.engine_arguments(specification(graphs=FULL, drafts=1, batches=[8, 1]))
    assert not graphs["enforce_eager"]
    assert graphs["compilation_config"]["cudagraph_capture_sizes"] == [2, 16]
    assert graphs["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 1}


def test_prompts_share_a_beginning():
    made = vllm_engine.prompts(3, [100, 40], 0)
    assert [len(tokens) for tokens in made] == [100, 40, 100]
    assert made[0][:75] == made[2][:75] and made[0][75:] != made[2][75:] and made[1][:30] == made[0][:30]


def test_model(tmp_path):
    config = model_config(4, 1)
    assert config["index_topk"] == TOPK == 2048 and config["num_nextn_predict_layers"] == 1
    names = [name for name, *_ in matrices(4)] + [name for name, *_ in vectors(4)]
    assert len(set(names)) == len(names)
    assert sum(rows * columns for _, rows, columns in matrices(4)) < 6e8
    write_model(tmp_path / "model", 4, weights=False)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == model_config(4)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_compare_counts_every_row_inside_the_engine(vllm, monkeypatch):
    monkeypatch.setattr(vllm_engine, "SAMPLE_EVERY", 2)
    result = vllm_engine.run(specification())
    compared = result["compared"]
    assert compared["rows"] == compared["rows_longer_than_k"] > 50
    assert compared["rows_that_differ"] == compared["numpy_rows_that_differ"] == 0
    assert compared["numpy_rows"] > 20
    assert [call["path"] for call in result["calls"]] == ["gvr_topk"]
    assert [(case["length"], case["batch"], case["tokens"]) for case in result["cases"]] == [
        (300, 1, 6),
        (300, 3, 18),
    ]
    assert result["cases"][1]["decode_steps"] == 3 and result["cases"][1]["decode_ms_median"] > 0
    assert result["churn"]["requests"] == 12 > result["churn"]["slots"] == 3
    assert vllm_trial.problem(specification(), result, active=True) is None
    assert vllm_trial.verdict([result | {"problem": None}]) == 0


def test_a_stopped_engine_leaves_what_it_has_done(vllm, tmp_path, monkeypatch):
    given, result = tmp_path / "spec.json", tmp_path / "result.json"
    kept = []
    vllm_engine.run(
        specification(OURS, profile=True, steps=30), lambda partial: kept.append(json.dumps(partial))
    )
    assert [len(json.loads(partial)["cases"]) for partial in kept] == [1, 1, 2, 2]
    case = json.loads(kept[-1])["cases"][-1]
    assert case["profile"] == {"steps": vllm_engine.PROFILED_STEPS, "gpu_us_per_step": 0.0, "kernels": {}}
    given.write_text(json.dumps(specification(churn=False).__dict__))
    vllm_engine.main([str(given), str(result)])
    assert len(json.loads(result.read_text())["cases"]) == 2

    def stopped(command, log, *, timeout_s):
        Path(command[4]).write_text(kept[0])
        raise CommandError(command, "no end after 9 s", log)

    monkeypatch.setattr(vllm_trial, "run_command", stopped)
    engine = vllm_trial.run_engine(specification(OURS), tmp_path, 9)
    assert len(engine["cases"]) == 1 and "no end after 9 s" in engine["problem"]


def test_times_of_kernels(monkeypatch):
    names = [("kernel", "gvr_topk::select<2048>", 4.0), ("kernel", "gvr_topk::select<2048>", 6.0)]
    names += [("kernel", "gemm", 70.0), ("cpu_op", "aten::topk", 9.0)]
    events = [{"cat": kind, "name": name, "dur": spent} for kind, name, spent in names]

    class Profiler:
        def start(self):
            pass

        stop = start

        def export_chrome_trace(self, path):
            Path(path).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profiler())
    monkeypatch.setattr(vllm_engine, "PROFILED_STEPS", 2)
    times = vllm_engine.KernelTimes()
    times.before_step()
    times.after_step()
    assert times.as_dict() is None
    times.before_step()
    times.after_step()
    kernel = {"calls": 2, "us_median": 5.0, "us_mean": 5.0, "us_longest": 6.0}
    assert times.as_dict() == {
        "steps": 2,
        "gpu_us_per_step": 40.0,
        "kernels": {"gvr_topk::select<2048>": kernel},
    }


def test_compare_sees_what_is_wrong(vllm, monkeypatch):
    """The own top-k of the fake has the right set in another order, and that is a difference."""
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    result = vllm_engine.run(specification(churn=False))
    assert result["compared"]["rows_that_differ"] == result["compared"]["rows"] > 0
    assert vllm_trial.verdict([result | {"problem": "ours was not on"}]) == 1


def test_compare_with_one_length_for_several_rows():
    comparison = Comparison("cpu")
    logits = torch.randn(4, 64)
    lengths = torch.tensor([40, 1], dtype=torch.int32)
    chosen = torch.full((4, 8), -1, dtype=torch.int32)
    wrapped = comparison.wrap(lambda *arguments: None)
    wrapped(None, logits, lengths, 2, chosen, 8, 64)
    counted = comparison.as_dict()
    # The second request's first row has no keys, and -1 is right for it.
    assert (counted["rows"], counted["rows_longer_than_k"], counted["rows_that_differ"]) == (3, 2, 3)
    comparison.reset()
    assert not any(comparison.as_dict().values())


def test_stock_and_ours(vllm, monkeypatch):
    with monkeypatch.context() as environment:
        environment.setenv("GVR_TOPK_DISABLE", "1")
        stock = vllm_engine.run(specification(STOCK, churn=False))
    assert stock["calls"] == [] and stock["compared"] is None and stock["churn"] is None
    assert vllm_trial.problem(specification(STOCK), stock, active=False) is None
    assert "ours ran" in str(vllm_trial.problem(specification(STOCK), stock, active=True))
    ours = vllm_engine.run(specification(OURS, churn=False))
    assert vllm_trial.problem(specification(OURS), ours, active=True) is None
    assert "does not say" in str(vllm_trial.problem(specification(OURS), ours, active=False))
    ours["calls"].append({"path": "original", "reason": "backend chosen", "count": 1})
    assert "backend chosen" in str(vllm_trial.problem(specification(OURS), ours, active=True))


def test_compared_rows_have_to_be_long():
    result = {"calls": [], "compared": {"rows_longer_than_k": 0}}
    assert "longer than k" in str(vllm_trial.problem(specification(), result, active=True))


def test_log_is_the_evidence():
    assert read_evidence([ON]).active
    assert read_evidence(["gvr_topk in vLLM 0.34.0: refused: wanted vLLM 0.33"]).refused
    assert not read_evidence(["gvr_topk in vLLM 0.33.0: off: GVR_TOPK_DISABLE is set"]).active


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 3)])
def test_report(tmp_path, monkeypatch, capsys, fails, code):
    compared = {"rows": 9, "rows_longer_than_k": 9, "rows_that_differ": 0, "numpy_rows_that_differ": 0}
    seen = []

    def run_command(command, log, *, timeout_s):
        spec = json.loads(Path(command[3]).read_text())
        seen.append((spec["mode"], vllm_trial.os.environ.get("GVR_TOPK_DISABLE")))
        if fails and spec["mode"] == OURS:
            raise CommandError(command, "exit status 1", log)
        log.write_text("" if spec["mode"] == STOCK else ON)
        calls = [] if spec["mode"] == STOCK else [{"path": "gvr_topk", "reason": "hint", "count": 1}]
        result = {"mode": spec["mode"], "cases": [], "calls": calls}
        Path(command[4]).write_text(
            json.dumps(result | {"compared": compared if spec["mode"] == COMPARE else None})
        )

    monkeypatch.setattr(vllm_trial, "run_command", run_command)
    monkeypatch.setattr(vllm_trial, "output_lines", lambda log, command: log.read_text().splitlines())
    monkeypatch.setattr(vllm_trial, "missing", list)
    monkeypatch.setattr(vllm_trial.importlib.metadata, "version", lambda name: "0.33.0")
    out = tmp_path / "trial.json"
    command = [
        "vllm-trial",
        "--out",
        str(out),
        "--work",
        str(tmp_path / "w"),
        "--drafts",
        "1",
        "--graphs",
        "full",
    ]
    assert main(command) == code
    assert seen == [(STOCK, "1"), (OURS, None), (COMPARE, None)]
    report = json.loads(out.read_text())
    assert report["format"] == "gvr_topk.vllm_trial/1" and report["machine"]["commit"]
    assert [bool(engine["problem"]) for engine in report["engines"]] == [False, fails, False]
    said = capsys.readouterr().out
    assert "compare_full_drafts1: 0 of 9 rows differ" in said and ("exit status 1" in said) is fails
