"""Reports and logs are read for the right figure, and refused when it is not there."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from eval.campaigns.reports import (
    EVAL_TASKS,
    ReportError,
    read_bench_report,
    read_eval_log,
    read_serve_report,
)

SAMPLES = Path(__file__).resolve().parent.parent / "data" / "eval_samples"


def _text(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


SCORES = {"mmlu": 44.44, "gsm8k": 65.0, "gpqa_diamond": 55.55, "longbench_v1": 20.0}


@pytest.mark.parametrize("task", EVAL_TASKS)
def test_score_is_that_of_the_log_and_of_no_other_task(task: str) -> None:
    assert read_eval_log(task, _text(f"trtllm_eval_{task}.log")) == {"score": SCORES[task]}
    for other in EVAL_TASKS.keys() - {task}:
        with pytest.raises(ReportError, match=f"no score of {task}"):
            read_eval_log(task, _text(f"trtllm_eval_{other}.log"))


def test_last_summary_counts_and_an_impossible_score_is_refused() -> None:
    line = "MMLU weighted average accuracy: {} (400)\n"
    assert read_eval_log("mmlu", line.format("11.00") + line.format("22.00")) == {"score": 22.0}
    for score in ("700", "-1"):
        with pytest.raises(ReportError, match=f"wanted 0 to 100, got {score}"):
            read_eval_log("mmlu", line.format(score))


def test_bench_report_with_and_without_speculation() -> None:
    plain = read_bench_report(SAMPLES / "trtllm_bench_mtp0.json")
    assert plain == {
        "tpot_ms": 22.125,
        "ttft_ms": 333.0,
        "acceptance": None,
        "requests": 5,
        "output_tokens": 1024.0,
    }
    assert read_bench_report(SAMPLES / "trtllm_bench_mtp1.json") == {**plain, "acceptance": 0.4375}


def test_report_of_a_servers_client() -> None:
    path = SAMPLES / "vllm_bench_serve_mtp1.json"
    assert read_serve_report(path) == read_bench_report(SAMPLES / "trtllm_bench_mtp1.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("completed", 0),
        ("completed", "5"),
        ("failed", 1),
        ("mean_tpot_ms", 0),
        ("mean_tpot_ms", float("nan")),
        ("mean_ttft_ms", -3),
        ("total_output_tokens", True),
        ("spec_decode_acceptance_rate", 101.0),
    ],
)
def test_impossible_figures_of_a_servers_client_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "report.json"
    data = json.loads(_text("vllm_bench_serve_mtp1.json"))
    path.write_text(json.dumps({**data, "spec_decode_acceptance_rate": None}))
    assert read_serve_report(path)["acceptance"] is None
    for changed in ({**data, name: value}, {key: its for key, its in data.items() if key != name}):
        path.write_text(json.dumps(changed))
        if name in changed or name != "spec_decode_acceptance_rate":
            with pytest.raises(ReportError, match=rf"report\.json: {name}: "):
                read_serve_report(path)


@pytest.mark.parametrize("value", [True, "22.1", float("nan"), float("inf"), -3, [], 10**400], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "streaming_metrics.avg_tpot_ms",
        "streaming_metrics.avg_ttft_ms",
        "streaming_metrics",
        "request_info.num_requests",
        "request_info",
        "decoding_stats.draft_acceptance_rate_percentiles.average",
    ],
)
def test_impossible_figures_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "report.json"
    data = json.loads(_text("trtllm_bench_mtp1.json"))
    *way, last = name.split(".")
    functools.reduce(dict.__getitem__, way, data)[last] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ReportError, match=rf"report\.json: {name}"):
        read_bench_report(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"half": ', "Invalid JSON"),
        ("[]", "should be an object"),
        ("[" * 100_000, "recursion"),
        ("{}", "streaming_metrics.avg_tpot_ms: Field required"),
    ],
    ids=["half", "list", "deep", "no figures"],
)
def test_unusable_reports(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(ReportError, match="wrote no report"):
        read_bench_report(path)
    path.write_text(text)
    with pytest.raises(ReportError, match=message):
        read_bench_report(path)
