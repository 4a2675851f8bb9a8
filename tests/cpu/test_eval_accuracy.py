"""The accuracy script runs what it prints, survives interruption, and decides by its stated rule."""

import json
import shlex
from pathlib import Path

import pytest
from eval_fakes import HOOK_LINE, Campaign, Ended, run_verb

from eval.campaigns.accuracy import MARGIN_FLOOR, PAPER, report
from eval.campaigns.runs import Comparison
from eval.campaigns.verdicts import decide

FAKE = """
lines = {
    "mmlu": "MMLU weighted average accuracy: {:.2f} (14042)",
    "gsm8k": "lm-eval gsm8k average accuracy: {:.2f}",
}
task = next(word for word in arguments if word in lines)
side = "on" if any(word.endswith("_on.yaml") for word in arguments) else "off"
count = state.joinpath(task + side)
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
print("[TensorRT-LLM] TensorRT-LLM version: 1.2.1")
if side == "on":
    print(hook)
failing = state.joinpath("fail")
if failing.exists() and failing.read_text() == f"{task} {side} {number}":
    print("CUDA out of memory")
    sys.exit(7)
print(lines[task].format(json.loads(state.joinpath("scores").read_text())[task][side][number]))
"""


class Bench(Campaign):
    """A fake trtllm-eval on PATH, and the script run against it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch, "trtllm-eval", FAKE)

    def scores(self, **tasks: tuple[list[float], list[float]]) -> None:
        data = {task: {"off": off, "on": on} for task, (off, on) in tasks.items()}
        (self.state / "scores").write_text(json.dumps(data))

    def run(self, *arguments: str) -> Ended:
        return run_verb("accuracy", "--model", "/models/m", "--out", str(self.out), *arguments)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


SAME = [95.0, 95.1] * 3, [95.1, 95.0] * 3


def test_margins_are_the_papers_spread() -> None:
    margins = {task: round(item.margin, 2) for task, item in PAPER.items()}
    assert margins == {"mmlu": MARGIN_FLOOR, "gsm8k": 0.46, "gpqa_diamond": 3.54, "longbench_v1": 0.76}
    for item in PAPER.values():
        assert abs(item.on - item.off) < item.margin  # the paper's own outcome is within its spread


def test_report_says_what_to_doubt() -> None:
    scores = [
        ("mmlu", [90.0, 90.01] * 4, [89.95, 89.96] * 4, 0.1),
        ("gsm8k", [95.0, 95.5, 95.4, 94.9], [95.0, 94.8, 95.5, 95.6], 0.46),
        ("longbench_v1", [44.0], [44.0], 0.76),
    ]
    margins = [margin for *_, margin in scores]
    decisions = decide([(off, on) for _, off, on, _ in scores], 3, margins=margins, resolution=0.01)
    text = report(
        [
            Comparison({"task": name}, tuple(off), tuple(on), decision)
            for (name, off, on, _), decision in zip(scores, decisions, strict=True)
        ]
    )
    assert "mmlu: within the margin, yet the interval excludes zero (on is worse)" in text
    assert "gsm8k: open; the next look is at 6 runs of each variant." in text
    assert "longbench_v1: open; the next look is at 6 runs of each variant." in text
    assert "95.11 -> 95.23 (+0.12)" in text


def test_commands_run_are_the_commands_printed_and_what_they_said_is_kept(bench: Bench) -> None:
    bench.scores(mmlu=([87.5] * 6, [87.5] * 6), gsm8k=SAME)
    options = (
        "--runs", "6", "--task", "mmlu", "--task", "gsm8k",
        "--eval-args", "--tp_size 8", "--config-flag", "--extra_llm_api_options",
        "--task-args", "gsm8k=--num_samples 20",
    )  # fmt: skip
    printed = [line for line in bench.run(*options, "--dry-run").output.splitlines() if line[0] != "#"]
    result = bench.run(*options)
    assert result.exit_code == 0, result.output
    assert [["trtllm-eval", *call] for call in bench.calls] == [shlex.split(line) for line in printed]
    again = bench.run(*options, "--dry-run").output
    assert again.count("(done: will not run again)") == 24
    assert f"gvr_topk in the logs of the 'on' runs:\n  {HOOK_LINE}" in result.output
    _, compared = bench.results["decisions"]
    assert compared["case"] == {"task": "gsm8k"} and compared["decision"]["verdict"] == "within"
    assert (compared["off"], compared["on"]) == SAME
    assert {run["version"] for run in bench.results["runs"]} == {"1.2.1"}


def test_regression_is_an_exit_status(bench: Bench) -> None:
    bench.scores(gsm8k=(SAME[0], [value - 5 for value in SAME[1]]))
    result = bench.run("--runs", "6", "--task", "gsm8k")
    assert result.exit_code == 1
    assert "regression" in result.output
    # The same runs, judged with another margin: nothing is run again.
    calls = len(bench.calls)
    assert bench.run("--runs", "6", "--task", "gsm8k", "--margin", "gsm8k=20").exit_code == 0
    assert len(bench.calls) == calls


def test_failure_is_explained_and_the_others_go_on(bench: Bench) -> None:
    bench.scores(gsm8k=(SAME[0], [95.1, *SAME[1]]))
    (bench.state / "fail").write_text("gsm8k on 0")
    result = bench.run("--runs", "6", "--task", "gsm8k")
    assert result.exit_code == 3
    assert "exit status 7" in result.output and "| CUDA out of memory" in result.output
    assert "command: trtllm-eval --model /models/m" in result.output
    assert len(bench.calls) == 12
    assert "1 of 12 runs failed" in result.output
    assert len(bench.results["failures"]) == 1
    # The repetitions behind the gap wait for it.
    assert "gsm8k: no decision, no repetition has finished both off and on" in result.output
    # The failed run alone is done again.
    (bench.state / "fail").unlink()
    assert bench.run("--runs", "6", "--task", "gsm8k").exit_code == 0
    assert len(bench.calls) == 13
    assert len(bench.results["decisions"][0]["on"]) == 6


def test_disabled_is_not_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    result = bench.run("--runs", "1", "--task", "gsm8k")
    assert result.exit_code == 3
    assert "GVR_TOPK_DISABLE is set" in result.output and bench.calls == []


def test_tasks_run_before_count_in_the_family(bench: Bench) -> None:
    """Leaving the other tasks out of a later command does not make its error rate larger."""
    bench.scores(gsm8k=SAME, mmlu=([87.5] * 6, [87.5] * 6))
    bench.run("--runs", "6", "--task", "gsm8k", "--task", "mmlu")
    assert bench.results["family"] == 2
    both = {item["case"]["task"]: item["decision"] for item in bench.results["decisions"]}
    bench.run("--runs", "6", "--task", "gsm8k")
    assert bench.results["family"] == 2
    alone = bench.results["decisions"][0]["decision"]
    assert (alone["low"], alone["high"]) == (both["gsm8k"]["low"], both["gsm8k"]["high"])


@pytest.mark.parametrize("kind", ["unwritable out", "store is a file", "out is a file"])
def test_a_fault_of_the_tool_is_never_a_regression(bench: Bench, kind: str) -> None:
    bench.scores(gsm8k=SAME)
    if kind == "store is a file":
        bench.out.mkdir()
        (bench.out / "runs").write_text("")
    elif kind == "out is a file":
        bench.out.write_text("")
    else:
        (bench.out / "results.json").mkdir(parents=True)  # also for root, who may write everywhere
    result = bench.run("--runs", "6", "--task", "gsm8k")
    assert result.exit_code == 4, result.output
    assert "error: " in result.output and "Traceback" not in result.output


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
