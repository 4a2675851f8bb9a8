"""Reports and logs are read for the right figure, and refused when it is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.campaigns.reports import (
    EVAL_TASKS,
    ReportError,
    read_bench_report,
    read_client_report,
    read_eval_log,
)

SAMPLES = Path(__file__).resolve().parent.parent / "data" / "eval_samples"


def _text(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def test_every_sample_says_that_it_is_one() -> None:
    names = [path for path in SAMPLES.iterdir() if path.suffix in (".log", ".json", ".sse")]
    assert len(names) >= 9
    for path in names:
        recorded = path.name == "vllm_serve_completions.sse"
        said = ": Recorded from the HTTP code of vLLM 0.33.0" if recorded else "Written by hand for the tests"
        assert said in path.read_text(encoding="utf-8"), path.name


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


def _client_report(path: Path, **change: Any) -> Path:
    result = {"ttft_ms": 50.0, "tpot_ms": 5.0, "total_ms": 85.0, "output_tokens": 8, "chunks": 8}
    data = {
        "url": "http://x",
        "model": "m",
        "concurrency": 1,
        "mean_tpot_ms": 5.0,
        "mean_ttft_ms": 50.0,
        "mean_output_tokens": 8.0,
        "tokens_per_step": 2.5,
        "requests": [result, result],
        **change,
    }
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "absent"}))
    return path


def test_client_report_turns_tokens_per_step_into_acceptance(tmp_path: Path) -> None:
    path = _client_report(tmp_path / "report.json")
    figures = {"tpot_ms": 5.0, "ttft_ms": 50.0, "acceptance": 0.5, "requests": 2, "output_tokens": 8.0}
    assert read_client_report(path, 3) == figures
    assert read_client_report(path, 0)["acceptance"] is None
    assert read_client_report(_client_report(path, tokens_per_step=None), 3)["acceptance"] is None


@pytest.mark.parametrize(
    ("per_step", "fits"), [(1.0, True), (4.0, True), (0.5, False), (4.5, False), ("2", False)]
)
def test_tokens_per_step_lie_between_one_and_all_drafts(tmp_path: Path, per_step: Any, fits: bool) -> None:
    path = _client_report(tmp_path / "report.json", tokens_per_step=per_step)
    if fits:
        assert read_client_report(path, 3)["acceptance"] == (per_step - 1) / 3
    else:
        with pytest.raises(ReportError, match="tokens_per_step: "):
            read_client_report(path, 3)


@pytest.mark.parametrize("requests", [None, [], 2, "absent", [{}]])
def test_a_client_report_without_requests_is_refused(tmp_path: Path, requests: Any) -> None:
    with pytest.raises(ReportError, match=r"report\.json: requests"):
        read_client_report(_client_report(tmp_path / "report.json", requests=requests), 0)


PLACES: dict[str, Callable[[Any, Any], None]] = {
    "streaming_metrics.avg_tpot_ms": lambda data, value: data["streaming_metrics"].update(avg_tpot_ms=value),
    "streaming_metrics.avg_ttft_ms": lambda data, value: data["streaming_metrics"].update(avg_ttft_ms=value),
    "streaming_metrics": lambda data, value: data.update(streaming_metrics=value),
    "request_info.num_requests": lambda data, value: data["request_info"].update(num_requests=value),
    "request_info": lambda data, value: data.update(request_info=value),
    "decoding_stats.draft_acceptance_rate_percentiles.average": lambda data, value: data["decoding_stats"][
        "draft_acceptance_rate_percentiles"
    ].update(average=value),
}


@pytest.mark.parametrize("value", [True, "22.1", float("nan"), float("inf"), -3, [], 10**400], ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_impossible_figures_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "report.json"
    data = json.loads(_text("trtllm_bench_mtp1.json"))
    PLACES[name](data, value)
    path.write_text(json.dumps(data))
    with pytest.raises(ReportError, match=rf"report\.json: {name}"):
        read_bench_report(path)
    for key in ("mean_tpot_ms", "mean_ttft_ms", "mean_output_tokens"):
        with pytest.raises(ReportError, match=rf"report\.json: {key}: "):
            read_client_report(_client_report(path, **{key: value}), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"half": ', "Invalid JSON"),
        ("[]", "should be an object"),
        ("[" * 100_000, "recursion"),
        ("{}", "streaming_metrics: Field required"),
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
