"""The accuracy script runs what it prints, survives interruption, and decides by its stated rule."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from eval_fakes import write_program
from typer.testing import CliRunner

from eval.accuracy_regression import MARGIN_FLOOR, PAPER, Decision, decide, exit_status, main, report

ROOT = Path(__file__).resolve().parents[2]

FAKE = """
import json, os, sys
from pathlib import Path
state = Path({state!r})
arguments = sys.argv[1:]
with state.joinpath("calls").open("a") as stream:
    stream.write(json.dumps(arguments) + "\\n")
task = next(word for word in arguments if word in ("mmlu", "gsm8k", "gpqa_diamond", "longbench_v1"))
side = "on" if any(word.endswith("_on.yaml") for word in arguments) else "off"
count = state.joinpath(task + side)
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
print("[TensorRT-LLM] TensorRT-LLM version: 1.2.1")
if side == "on":
    print("[I] gvr_topk: heuristic top-k on")
print("loading", task, side)
failing = state.joinpath("fail")
if failing.exists() and failing.read_text() == f"{{task}} {{side}} {{number}}":
    print("CUDA out of memory")
    sys.exit(7)
score = json.loads(state.joinpath("scores").read_text())[task][side][number]
lines = {{
    "mmlu": "MMLU weighted average accuracy: {{:.2f}} (14042)",
    "gsm8k": "lm-eval gsm8k average accuracy: {{:.2f}}",
    "gpqa_diamond": "lm-eval gpqa_diamond_cot_zeroshot_aa average accuracy: {{:.2f}}",
    "longbench_v1": "lm-eval longbench average 'score' across 6 subgroups: {{:.2f}}",
}}
if score is not None:
    print(lines[task].format(score))
if "--output_path" in arguments:
    folder = Path(arguments[arguments.index("--output_path") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    data = {{"results": {{"gsm8k": {{"exact_match,strict-match": score + 0.001}}}}}}
    folder.joinpath("samples_gsm8k.json").write_text(json.dumps(data))
"""


class Bench:
    """A fake trtllm-eval on PATH, and the script run against it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        self.out = folder / "out"
        write_program(folder / "bin", "trtllm-eval", FAKE.format(state=str(self.state)))
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")

    def scores(self, **tasks: tuple[list[float | None], list[float | None]]) -> None:
        data = {task: {"off": off, "on": on} for task, (off, on) in tasks.items()}
        (self.state / "scores").write_text(json.dumps(data))

    def fail(self, which: str) -> None:
        (self.state / "fail").write_text(which)

    @property
    def calls(self) -> list[list[str]]:
        path = self.state / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(self, *arguments: str) -> Any:
        app = typer.Typer()
        app.command()(main)
        return CliRunner().invoke(app, ["--model", "/models/m", "--out", str(self.out), *arguments])

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def _decide(off: list[float], on: list[float], margin: float = 0.5, sd: float = 0.2) -> Decision:
    return decide("gsm8k", off, on, margin=margin, assumed_sd=sd)


@pytest.mark.parametrize(
    ("off", "on", "verdict"),
    [
        ([90.0, 90.1, 90.2], [90.0, 90.1, 90.2], "within"),
        ([90.0, 90.1, 90.2], [92.0, 92.1, 92.2], "within"),  # a gain is never a regression
        ([90.0, 90.1, 90.2], [89.9, 90.0, 90.1], "within"),
        ([90.0, 90.1, 90.2], [88.0, 88.1, 88.2], "regression"),
        ([90.0, 90.1, 90.2], [89.5, 89.6, 89.7], "inconclusive"),  # a loss of just the margin
        ([85.0, 95.0], [85.5, 95.5], "inconclusive"),  # too noisy to exclude anything
        ([90.0, 90.0], [90.0, 90.0], "within"),
        ([90.0, 90.0], [89.0, 89.0], "regression"),
    ],
)
def test_rule(off: list[float], on: list[float], verdict: str) -> None:
    assert _decide(off, on).verdict == verdict


def test_rule_at_its_edges() -> None:
    base, spread = [90.0, 90.2, 90.4], [-0.2, 0.0, 0.2]
    reference = _decide(base, base)
    half = reference.high  # the same spread on both sides at any shift
    for shift, verdict in (
        (-0.5 + half + 1e-6, "within"),
        (-0.5 + half - 1e-6, "inconclusive"),
        (-0.5 - half + 1e-6, "inconclusive"),
        (-0.5 - half - 1e-6, "regression"),
    ):
        assert _decide(base, [90.2 + shift + item for item in spread]).verdict == verdict


def test_more_runs_settle_an_inconclusive_task() -> None:
    off, on = [90.0, 90.6], [89.9, 90.5]
    assert _decide(off, on).verdict == "inconclusive"
    assert _decide(off * 8, on * 8).verdict == "within"


def test_single_runs() -> None:
    both = _decide([90.0], [89.9], sd=0.1)
    assert (both.basis, both.verdict) == ("assumed", "within")
    assert _decide([90.0], [89.9], sd=0.5).verdict == "inconclusive"
    assert _decide([90.0], [80.0]).verdict == "regression"
    one = _decide([90.0], [89.9, 90.0, 90.1, 90.0])
    assert (one.basis, one.verdict) == ("pooled", "within")


def test_margin_must_be_positive() -> None:
    with pytest.raises(ValueError, match="margin: wanted a positive number"):
        _decide([1.0], [1.0], margin=0.0)


def test_margins_are_the_papers_spread() -> None:
    margins = {task: round(item.margin, 2) for task, item in PAPER.items()}
    assert margins == {"mmlu": MARGIN_FLOOR, "gsm8k": 0.46, "gpqa_diamond": 3.54, "longbench_v1": 0.76}
    for item in PAPER.values():
        assert abs(item.on - item.off) < item.margin  # the paper's own outcome is within its spread


def test_papers_mmlu_runs_pass_the_rule() -> None:
    runs = [87.52, 87.51, 87.49, 87.49]
    got = decide("mmlu", [87.51], runs, margin=PAPER["mmlu"].margin, assumed_sd=PAPER["mmlu"].sd)
    assert (got.verdict, got.basis) == ("within", "pooled")


def test_report_says_what_to_doubt() -> None:
    close = decide("mmlu", [90.0, 90.001], [89.95, 89.951], margin=0.1, assumed_sd=0.01)
    single = decide("gsm8k", [95.0], [95.0], margin=0.46, assumed_sd=0.2)
    text = report([close, single])
    assert "mmlu: within the margin, yet the interval excludes zero (on is worse)" in text
    assert "gsm8k: one run each" in text
    assert "95.11 -> 95.23 (+0.12)" in text


def test_exit_status_follows_the_worst() -> None:
    good, bad, open_ = (
        _decide([90.0] * 2, [90.0] * 2),
        _decide([90.0] * 2, [80.0] * 2),
        _decide([80.0, 99.0], [80.0, 99.0]),
    )
    assert exit_status([good], complete=True) == 0
    assert exit_status([good], complete=False) == 3
    assert exit_status([good, open_], complete=True) == 3
    assert exit_status([good, open_, bad], complete=False) == 1
    assert exit_status([], complete=True) == 3


def test_dry_run_prints_the_exact_commands_and_writes_nothing(bench: Bench) -> None:
    result = bench.run("--runs", "2", "--task", "gpqa_diamond", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("#")]
    configs = [
        str(ROOT / "configs" / "eval" / f"dep8_mtp1_{side}.yaml") for side in ("off", "on", "on", "off")
    ]
    assert [shlex.split(line) for line in lines] == [
        [
            "trtllm-eval", "--model", "/models/m", "--custom_tokenizer", "deepseek_v32", "--config", config,
            "gpqa_diamond", "--apply_chat_template", "--chat_template_kwargs", '{"thinking": true}',
            "--max_output_length", "120000",
        ]
        for config in configs
    ]  # fmt: skip
    assert not bench.out.exists()
    assert bench.calls == []


def test_commands_run_are_the_commands_printed(bench: Bench) -> None:
    bench.scores(mmlu=([87.5, 87.5], [87.5, 87.5]), gsm8k=([95.0, 95.1], [95.1, 95.0]))
    options = (
        "--runs", "2", "--task", "mmlu", "--task", "gsm8k", "--order", "alternate",
        "--eval-args", "--tp_size 8", "--config-flag", "--extra_llm_api_options",
        "--task-args", "gsm8k=--num_samples 20",
    )  # fmt: skip
    printed = [line for line in bench.run(*options, "--dry-run").output.splitlines() if line[0] != "#"]
    result = bench.run(*options)
    assert result.exit_code == 0, result.output
    assert [["trtllm-eval", *call] for call in bench.calls] == [shlex.split(line) for line in printed]
    again = bench.run(*options, "--dry-run").output
    assert again.count("(done: will not run again)") == 8


def test_decision_record_and_remarks(bench: Bench) -> None:
    bench.scores(gsm8k=([95.0, 95.2, 95.1], [95.1, 95.2, 95.0]))
    result = bench.run("--runs", "3", "--task", "gsm8k")
    assert result.exit_code == 0, result.output
    assert "gvr_topk in the logs of the 'on' runs:" in result.output
    assert "heuristic top-k on" in result.output
    decision = bench.results["decisions"][0]
    assert decision["verdict"] == "within"
    assert (decision["off"], decision["on"]) == ([95.0, 95.2, 95.1], [95.1, 95.2, 95.0])
    assert {run["version"] for run in bench.results["runs"]} == {"1.2.1"}


def test_regression_is_an_exit_status(bench: Bench) -> None:
    bench.scores(gsm8k=([95.0, 95.2], [90.1, 90.2]))
    result = bench.run("--runs", "2", "--task", "gsm8k")
    assert result.exit_code == 1
    assert "regression" in result.output
    # The same runs, judged with another margin: nothing is run again.
    calls = len(bench.calls)
    assert bench.run("--runs", "2", "--task", "gsm8k", "--margin", "gsm8k=20").exit_code == 0
    assert len(bench.calls) == calls


def test_failure_is_explained_and_the_others_go_on(bench: Bench) -> None:
    bench.scores(gsm8k=([95.0, 95.2, 95.1], [95.1, 95.2, 95.0]))
    bench.fail("gsm8k on 0")
    result = bench.run("--runs", "2", "--task", "gsm8k")
    assert result.exit_code == 3
    assert "exit status 7" in result.output and "| CUDA out of memory" in result.output
    assert "command: trtllm-eval --model /models/m" in result.output
    assert len(bench.calls) == 4
    assert "1 of 4 runs failed" in result.output
    assert len(bench.results["failures"]) == 1
    # The failed run alone is done again.
    (bench.state / "fail").unlink()
    assert bench.run("--runs", "2", "--task", "gsm8k").exit_code == 0
    assert len(bench.calls) == 5


def test_stop_at_the_first_failure(bench: Bench) -> None:
    bench.scores(gsm8k=([95.0] * 3, [95.0] * 3), mmlu=([87.0] * 3, [87.0] * 3))
    bench.fail("gsm8k on 0")
    result = bench.run("--runs", "2", "--task", "gsm8k", "--task", "mmlu", "--no-keep-going")
    assert result.exit_code == 3
    assert len(bench.calls) == 2
    assert "gsm8k: no decision, 1 runs off and 0 on finished" in result.output


def test_interrupted_store_is_resumed(bench: Bench) -> None:
    bench.scores(gsm8k=([95.0, 95.2, 95.1], [95.1, 95.2, 95.0]))
    assert bench.run("--runs", "2", "--task", "gsm8k").exit_code == 0
    store = bench.out / "runs.jsonl"
    store.write_bytes(store.read_bytes()[:-30])  # the last run's line is half-written
    result = bench.run("--runs", "2", "--task", "gsm8k")
    assert result.exit_code == 0
    assert "unreadable line 4" in result.output
    assert len(bench.calls) == 5
    # More repetitions add runs, and keep those that are there.
    bench.scores(gsm8k=([95.0] * 9, [95.0] * 9))
    bench.run("--runs", "3", "--task", "gsm8k")
    assert len(bench.calls) == 7


def test_interrupt_ends_the_running_tool_and_keeps_the_finished_runs(bench: Bench, tmp_path: Path) -> None:
    bench.scores(gsm8k=([95.0, 95.2], [95.1, 95.0]))
    tool = tmp_path / "bin" / "trtllm-eval"
    finishing = tool.read_text()
    slow = (
        'if side == "on":\n    state.joinpath("pid").write_text(str(os.getpid()))\n'
        '    __import__("time").sleep(60)\n'
    )
    tool.write_text(finishing.replace('print("loading"', slow + 'print("loading"'))
    script = [sys.executable, str(ROOT / "eval" / "accuracy_regression.py")]
    options = ["--model", "/models/m", "--out", str(bench.out), "--runs", "1", "--task", "gsm8k"]
    process = subprocess.Popen(
        [*script, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    pid = bench.state / "pid"
    for _ in range(1000):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "interrupted; the same command goes on from here" in output
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    tool.write_text(finishing)
    result = bench.run("--runs", "1", "--task", "gsm8k")
    assert "variant off, repetition 1: done before" in result.output
    assert [run["labels"]["variant"] for run in bench.results["runs"]] == ["off", "on"]


def test_edited_configuration_is_measured_anew(bench: Bench, tmp_path: Path) -> None:
    bench.scores(gsm8k=([95.0] * 9, [95.0] * 9))
    files = []
    for side in ("off", "on"):
        files.append(tmp_path / f"x_{side}.yaml")
        files[-1].write_text((ROOT / "configs" / "eval" / f"dep8_mtp1_{side}.yaml").read_text())
    options = ("--runs", "1", "--task", "gsm8k", "--config-off", str(files[0]), "--config-on", str(files[1]))
    bench.run(*options)
    for file in files:
        file.write_text(file.read_text().replace("0.8", "0.7"))
    bench.run(*options)
    assert len(bench.calls) == 4


def test_run_without_a_score_is_a_failure(bench: Bench) -> None:
    bench.scores(mmlu=([None, 87.0], [87.0, 87.0]))
    result = bench.run("--runs", "1", "--task", "mmlu")
    assert result.exit_code == 3
    assert "exit status 0, but the log holds no score of mmlu" in result.output
    assert "| loading mmlu off" in result.output


def test_timeout_is_a_failure(bench: Bench, tmp_path: Path) -> None:
    write_program(tmp_path / "bin", "trtllm-eval", "import time; print('stuck', flush=True); time.sleep(60)")
    result = bench.run("--runs", "1", "--task", "mmlu", "--timeout", "0.5", "--no-keep-going")
    assert result.exit_code == 3
    assert "no end after 0.5 s" in result.output and "| stuck" in result.output


def test_missing_tool_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    result = bench.run("--runs", "1", "--task", "mmlu", "--no-keep-going")
    assert result.exit_code == 3
    assert "trtllm-eval not found; is TensorRT-LLM installed and on PATH?" in result.output


def test_json_reports_are_read_when_asked_for(bench: Bench) -> None:
    bench.scores(gsm8k=([95.0, 95.0], [95.0, 95.0]))
    result = bench.run("--runs", "2", "--task", "gsm8k", "--json-reports")
    assert result.exit_code == 0, result.output
    assert bench.results["decisions"][0]["on"] == [95.001, 95.001]
    assert all("--output_path" in call for call in bench.calls)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "hellaswag"), "hellaswag"),
        (("--task", "gsm8k", "--task", "mmlu", "--task", "gsm8k"), "each value once, got gsm8k more than"),
        (("--margin", "gsm8k=1", "--margin", "gsm8k=2"), "each value once, got gsm8k more than"),
        (("--task-args", "mmlu=--a", "--task-args", "mmlu=--b"), "each value once, got mmlu more than"),
        (("--margin", "gsm8k=-1"), "positive number"),
        (("--margin", "gsm8k=x"), "positive number"),
        (("--margin", "5"), "TASK="),
        (("--task-args", "none=--x"), "TASK="),
        (("--runs", "0"), "--runs"),
        (("--config-on", "none.yaml"), "none.yaml"),
    ],
)
def test_wrong_use(bench: Bench, options: tuple[str, ...], message: str) -> None:
    result = bench.run(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert bench.calls == []


def test_unfair_pair_is_refused(bench: Bench) -> None:
    other = str(ROOT / "configs" / "eval" / "dep8_mtp3_on.yaml")
    result = bench.run("--config-on", other)
    assert result.exit_code == 2
    assert "speculative_config.num_nextn_predict_layers differing too" in result.output
