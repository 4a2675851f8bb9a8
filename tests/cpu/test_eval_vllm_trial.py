"""``python -m eval vllm-trial``: what it would run, what it counts, and when nothing was shown."""

import importlib
import inspect
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))

from vllm_engine import Runner, fake_vllm

from eval.__main__ import main
from eval.campaigns.process import CommandError
from eval.engines import vllm_compare, vllm_engine, vllm_trial
from eval.engines.vllm_compare import Comparison
from eval.engines.vllm_engine import CASES, COMPARE, INVARIANCE, OURS, PARTS, STOCK, Specification
from eval.engines.vllm_model import GLM5, GLM52, V4, V32
from eval.engines.vllm_worker import Observed, merge_workers
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
        "batches": [1, 3],
        "lengths": [300],
        "steps": 6,
        "churn": True,
        "max_model_len": 400,
        "memory": 0.5,
    }
    return Specification(**(plain | changes))


def options(**changes) -> SimpleNamespace:
    defaults = {name: its.default for name, its in inspect.signature(vllm_trial.main).parameters.items()}
    return vllm_trial.parse(defaults | {"work": Path("w")} | changes)


COMPARED = {"rows_longer_than_k": 1, "prefill_rows_longer_than_k": 1, "merged_rows_longer_than_k": 0}


def served(*reasons: str) -> list[dict]:
    return [{"path": "gvr_topk", "reason": reason, "count": 7} for reason in reasons]


class FakeEngine:
    """Answers as vLLM's engine does, and runs the indexer layers of the fake for what decodes and starts.

    Without prefix caching every step has the same scores in the same rows.
    """

    def __init__(self, given: dict) -> None:
        self.runner = Runner(seqs=given["max_num_seqs"])
        self.same_scores = not given.get("enable_prefix_caching", True)
        self.workers = [Observed() for _ in range(given.get("tensor_parallel_size", 1) - 1)]
        for worker in self.workers:  # all of them in this process, where each sees all calls
            assert given["worker_extension_cls"] == f"{Observed.__module__}.{Observed.__qualname__}"
            worker.init_worker_extension()
        self.waiting: list = []
        self.live: list = []
        self.drawn: list = []  # parameters of every request

    def add_request(self, name, prompt, parameters) -> None:
        assert all(10 <= token < 32000 for token in prompt["prompt_token_ids"])
        self.waiting.append((name, len(prompt["prompt_token_ids"]), 0, parameters.max_tokens))
        self.drawn.append(parameters)

    def collective_rpc(self, method) -> list:
        return [getattr(worker, method)() for worker in self.workers]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.live)

    def step(self) -> list:
        starting: list = []
        while self.waiting and self.runner.free:
            name, length, done, tokens = self.waiting.pop(0)
            starting.append([self.runner.add(name, min(length, 380)), done, tokens])
        if self.same_scores:
            self.runner.generator.manual_seed(0)
        self.runner.step([request for request, *_ in self.live], [request for request, *_ in starting])
        self.live += starting
        outputs = []
        for item in self.live:
            item[1] += 1
            tokens = SimpleNamespace(token_ids=list(range(item[1])))
            outputs.append(SimpleNamespace(request_id=item[0].name, outputs=[tokens], num_cached_tokens=64))
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
        package.engines = []

        def llm(**given):
            package.engines.append(FakeEngine(given))
            return SimpleNamespace(llm_engine=package.engines[-1])

        package.LLM = llm
        loader = "vllm.model_executor.model_loader.dummy_loader"
        sys.modules[loader] = types.SimpleNamespace(
            DummyModelLoader=type("Loader", (), {"load_weights": None})
        )
        yield package


def test_missing_package_is_one_line(capsys):
    assert main(["vllm-trial"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "wanted the package vllm 0.33, got none: pip install 'gvr-topk[vllm]'" in said.err


def test_plan():
    plan = vllm_trial.plan(options())
    parts = {part: [spec for spec in plan if spec.part == part] for part in PARTS}
    assert [len(specs) for specs in parts.values()] == [12, 8, 8] and plan[0].mode == STOCK
    assert {(spec.chunk, spec.drafts) for spec in parts[INVARIANCE]} == {(8192, 0), (2048, 0)}
    assert vllm_trial.plan(options(parts="invariance", modes="compare")) == []
    models = {(spec.model, spec.drafts) for spec in parts[CASES]}
    assert models == {("w/cases_v32_drafts0", 0), ("w/cases_v32_drafts1", 1)}
    others = [vllm_trial.plan(options(model_shapes=shapes)) for shapes in (GLM5, GLM52, V4)]
    assert [len(each) for each in others] == [12 + 8] * 3
    every = [spec.name for specs in (plan, *others) for spec in specs]
    assert len(set(every)) == len(every)  # results and checkpoints of their own


def test_compare_counts_every_row_inside_the_engine(vllm, monkeypatch):
    monkeypatch.setattr(vllm_compare, "SAMPLE_EVERY", 2)
    result = vllm_engine.run(specification())
    compared = result["compared"]
    assert compared["rows"] == compared["rows_longer_than_k"] > 50
    assert compared["rows_that_differ"] == compared["numpy_rows_that_differ"] == 0
    assert compared["numpy_rows"] > 20
    assert [(call["path"], call["reason"]) for call in result["calls"]] == [
        ("gvr_topk", "hint"),
        ("gvr_topk", "prefill"),
    ]
    assert compared["prefill_rows"] == compared["prefill_rows_seen"] == 2 * 9 * (1 + 3 + 12)
    assert compared["prefill_rows_longer_than_k"] > 0 and compared["prefill_rows_that_differ"] == 0
    assert result["failures"] == []
    assert [(case["length"], case["batch"], case["tokens"], case["cached"]) for case in result["cases"]] == [
        (300, 1, 6, 64),
        (300, 3, 18, 192),
    ]
    assert result["cases"][1]["decode_steps"] == 3 and result["cases"][1]["decode_ms_median"] > 0
    assert result["churn"]["requests"] == 12 > result["churn"]["slots"] == 3
    assert vllm_trial.problem(specification(), result, active=True) is None
    assert vllm_trial.verdict([result | {"problem": None}]) == 0


def test_compare_sees_what_is_wrong(vllm, monkeypatch):
    """The own top-k of the fake has the right set in another order, and that is a difference."""
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    result = vllm_engine.run(specification(churn=False))
    assert result["compared"]["rows_that_differ"] == result["compared"]["rows"] > 0
    assert result["compared"]["prefill_rows_that_differ"] == result["compared"]["prefill_rows"] > 0
    assert vllm_trial.verdict([result | {"problem": "ours was not on"}]) == 1


def test_compare_some_rows_of_a_prefill_call(monkeypatch):
    """At equal distances, other ones in each call, and the last one; windows may begin anywhere."""
    monkeypatch.setattr(vllm_compare, "SLAB", 200)
    logits = torch.randn(40, 64)
    starts = torch.arange(40, dtype=torch.int32) % 7
    ends = starts + 3 * torch.arange(40, dtype=torch.int32).clamp(max=15)
    rows = []

    def op(logits, starts, ends, indices, *rest):
        indices.fill_(-1)
        for row in range(40):
            scores = logits[row : row + 1, int(starts[row]) : int(ends[row])]
            length = torch.tensor([scores.shape[1]])
            indices[row : row + 1, :8] = vllm_compare.exact_topk(scores, length, 8) if length else -1
        indices[rows, :8] = indices[rows, :8].flip(1)  # what is wrong

    comparison = Comparison("cpu", prefill_rows=10)
    wrapped = comparison.wrap_prefill(op)
    for wrong in ([], [39], [20, 21, 22, 23]):
        rows[:] = wrong
        out = torch.zeros(40, 9, dtype=torch.int32)
        wrapped(logits, starts, ends, out[:, :8], 40, 64, 1, 8)
    counted = comparison.as_dict()
    assert counted["prefill_rows_seen"] == 120
    assert 30 <= counted["prefill_rows"] + 1 <= 33 and counted["rows"] == 0
    assert counted["prefill_rows_that_differ"] == 2
    every = Comparison("cpu")
    every.wrap_prefill(op)(logits, starts, ends, out[:, :8], 40, 64, 1, 8)
    counted = every.as_dict()
    assert counted["prefill_rows_longer_than_k"] == 37 and counted["prefill_rows"] == 39
    assert counted["prefill_rows_that_differ"] == 4
    assert wrapped.__name__ == "op"


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(vllm_engine, "INVARIANCE_BATCHES", (1, 1, 2, 4))
    monkeypatch.setattr(vllm_engine, "INVARIANCE_STEPS", 3)


def test_invariance(vllm, short):
    result = vllm_engine.run(specification(OURS, part=INVARIANCE, batches=[1], split_k=False))
    spec = specification(OURS, part=INVARIANCE, split_k=False)
    assert result["failures"] == [] and vllm_trial.problem(spec, result, active=True) is None
    invariance = result["invariance"]
    assert [(run["batch"], run["copies"]) for run in invariance["runs"]] == [(1, 1), (1, 1), (2, 1), (4, 2)]
    assert invariance["prompts"] == 1 + 1 + 2
    answers = {"requests": 5, "tokens": 3, "different_answers": 1, "most_agree": 5}
    assert invariance["answers"] == answers | {"first_difference": None}
    said = vllm_trial._summary(spec, result | {"problem": None})
    assert said.endswith(": 1 answers to the same prompt in 5 requests")
    assert vllm_trial.verdict([result | {"problem": None}]) == 0
    invariance["answers"]["different_answers"] = 2
    assert vllm_trial.verdict([result | {"problem": None}]) == 1
    for other in ({"split_k": True}, {"mode": STOCK}):  # of which nothing is promised
        assert vllm_trial.verdict([result | other | {"problem": None}]) == 0
    vllm_engine.run(replace(spec, sampled=True))
    assert {(request.seed, request.top_p) for request in vllm.engines[-1].drawn} == {(7, 0.95)}


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


def test_chunks_count_as_the_median_of_their_shape(monkeypatch):
    """Events are numbers; the first scores of a shape wait for memory, and the first call for its kernel."""
    clock = iter([0.0, 5.0, 7.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0, 30.0, 32.0, 33.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, stop: "Event") -> float:
            return (stop.at - self.at) / 1000

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = vllm_compare.PrefillTimes()
    scores = times.wrap_scores(lambda logits: logits)
    top_k = times.wrap_prefill(lambda logits: None)
    for rows in (4, 4, 4, 2):
        top_k(scores(torch.empty(rows, 40)))
    taken = times.take()
    assert (taken["calls"], taken["rows"], taken["us"]) == (4, 14, 2.0 + 1.0 + 1.0 + 1.0)
    assert [(shape["us_median"], shape["us_longest"]) for shape in taken["shapes"]] == [
        (1.0, 1.0),
        (1.0, 2.0),
    ]
    assert taken["chunks"] == [{"width": 40, "rows": 14, "us": 3 * 2.0 + 3.0}]


@pytest.mark.parametrize(
    ("given", "change", "said"),
    [
        ({}, {}, ""),
        ({}, {"failures": ["1 x 8: OSError: odd"]}, "1 x 8: OSError: odd"),
        ({}, {"calls": []}, "no prefill call"),
        ({}, {"compared": COMPARED | {"rows_longer_than_k": 0}}, "no compared decode row was longer than k"),
        ({}, {"compared": COMPARED | {"prefill_rows_longer_than_k": 0}}, "no compared prefill row"),
        ({}, {"workers": [COMPARED, COMPARED | {"rows_longer_than_k": 0}]}, "longer than k in worker 1"),
        ({"slices": True}, {}, "no prefill slices call"),
        ({"slices": True}, {"calls": served("prefill", "prefill slices")}, ""),
        ({"dcp": True}, {}, "no dcp call"),
        ({"dcp": True}, {"calls": served("prefill", "dcp")}, "no compared merged row was longer than k"),
    ],
)
def test_what_shows_nothing(given: dict, change: dict, said: str) -> None:
    good = {"calls": served("prefill"), "failures": [], "compared": COMPARED}
    problem = vllm_trial.problem(specification(**given), good | change, active=True)
    assert said in problem if said else problem is None


def test_on_several_gpus_every_worker_compares(vllm):
    spec = specification(tensor_parallel=3, prefill_rows=5, batches=[2], churn=False)
    result = vllm_engine.run(spec)
    try:
        first, second = result["workers"]
        assert first["rows"] > 10 and first["prefill_rows"] < first["prefill_rows_seen"]
        assert first["rows_that_differ"] == first["prefill_rows_that_differ"] == 0
        assert result["compared"]["rows"] == first["rows"] + second["rows"]
        seen = [{"compared": each, "calls": served("hint"), "slots": 4} for each in (first, second)]
        seen[1]["compared"] = second | {"rows_that_differ": 2}
        assert vllm_trial.verdict([merge_workers(seen) | {"problem": None}]) == 1
    finally:
        for worker in reversed(vllm.engines[-1].workers):
            worker.gvr_topk_patches.rollback()


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 3)])
def test_report(tmp_path, monkeypatch, capsys, fails, code):
    compared = {"rows": 9, "rows_longer_than_k": 9, "rows_that_differ": 0, "numpy_rows_that_differ": 0}
    kinds = {f"{kind}_{name}": n for kind in ("prefill", "merged") for name, n in compared.items()}
    compared |= kinds | {"prefill_rows_seen": 20}
    seen = []

    def run_command(command, log, *, timeout_s):
        spec = json.loads(Path(command[3]).read_text())
        names = ("GVR_TOPK_DISABLE", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB")
        seen.append((spec["mode"], *map(vllm_trial.os.environ.get, names)))
        if fails and spec["mode"] == OURS:
            Path(command[4]).write_text('{"cases"')  # which is no reason to end the others
            raise CommandError(command, "exit status 1", log)
        log.write_text("" if spec["mode"] == STOCK else ON)
        served = [] if spec["mode"] == STOCK else ["prefill", "prefill slices"]
        calls = [{"path": "gvr_topk", "reason": reason, "count": 1} for reason in served]
        result = {**spec, "cases": [], "churn": None, "calls": calls, "failures": []}
        Path(command[4]).write_text(
            json.dumps(result | {"compared": compared if spec["mode"] == COMPARE else None})
        )

    monkeypatch.setattr(vllm_trial, "run_command", run_command)
    monkeypatch.setattr(vllm_trial, "output_lines", lambda log, command: log.read_text().splitlines())
    monkeypatch.setattr(vllm_trial, "missing", lambda shapes: [])
    monkeypatch.setattr(vllm_trial.importlib.metadata, "version", lambda name: "0.33.0")
    out = tmp_path / "trial.json"
    command = ["vllm-trial", "--out", str(out), "--work", str(tmp_path / "w"), "--drafts", "1"]
    command += ["--graphs", "full", "--parts", "cases", "--slices", "--logits-mb", "96"]
    assert main(command) == code
    assert seen == [(STOCK, "1", "96"), (OURS, None, "96"), (COMPARE, None, "96")]
    report = json.loads(out.read_text())
    assert report["format"] == "gvr_topk.vllm_trial/2" and report["machine"]["commit"]
    assert report["setup"]["shapes"] == V32 and "DeepSeek-V3.2's shapes" in report["what"]
    assert [bool(engine["problem"]) for engine in report["engines"]] == [False, fails, False]
    said = capsys.readouterr().out
    assert "compare_full_drafts1_slices96: 0 of 9 rows and 0 of 9 compared prefill rows differ" in said
    assert "compare_full_drafts1_slices96: 0 of 9 merged rows differ" in said
    assert ("exit status 1" in said) is fails


def test_streams_are_compared_side_by_side() -> None:
    def sides(drafts: int) -> dict[str, Any]:
        tokens = {"stock": [[1, 2 + drafts]], "ours": [[1, 2]]}
        return {side: {"tokens": each, "logits": [[5, 6]]} for side, each in tokens.items()}

    engines = [{"graphs": "full", "drafts": drafts, "streams": sides(drafts)} for drafts in (0, 3)]
    found = [(one["side"], one["requests_alike"]) for one in vllm_trial.streams(engines)]
    assert found == [("stock", 0), ("ours", 1)] and not any("streams" in engine for engine in engines)
