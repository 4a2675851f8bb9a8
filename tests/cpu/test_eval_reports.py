"""Reports and logs are read for the right figure, and refused when it is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.campaigns.reports import (
    EVAL_TASKS,
    ReportError,
    read_bench_log,
    read_bench_report,
    read_client_report,
    read_eval_json,
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


@pytest.mark.parametrize(
    ("task", "score"), [("mmlu", 44.44), ("gsm8k", 65.0), ("gpqa_diamond", 55.55), ("longbench_v1", 20.0)]
)
def test_score_from_a_log(task: str, score: float) -> None:
    assert read_eval_log(task, _text(f"trtllm_eval_{task}.log")) == score


@pytest.mark.parametrize("task", sorted(EVAL_TASKS))
def test_log_of_another_task_is_refused(task: str) -> None:
    others = [name for name in EVAL_TASKS if name != task]
    for other in others:
        with pytest.raises(ReportError, match=f"no score of {task}"):
            read_eval_log(task, _text(f"trtllm_eval_{other}.log"))


def test_last_summary_counts() -> None:
    line = "MMLU weighted average accuracy: {} (400)\n"
    assert read_eval_log("mmlu", line.format("11.00") + line.format("22.00")) == 22.0


def test_table_stands_in_for_the_summary() -> None:
    assert read_eval_log("gsm8k", _text("trtllm_eval_gsm8k_table_only.log")) == 65.0


def test_table_of_groups_is_not_averaged() -> None:
    text = _text("trtllm_eval_longbench_v1.log")
    cut = "".join(line for line in text.splitlines(keepends=True) if "average 'score'" not in line)
    with pytest.raises(ReportError, match="no score of longbench_v1"):
        read_eval_log("longbench_v1", cut)


def test_impossible_score_is_refused() -> None:
    with pytest.raises(ReportError, match="wanted 0 to 100, got 700"):
        read_eval_log("mmlu", "MMLU weighted average accuracy: 700 (1)")


def test_score_from_json_keeps_all_digits() -> None:
    assert read_eval_json("gsm8k", SAMPLES / "trtllm_eval_gsm8k.json") == 65.125
    assert read_eval_json("longbench_v1", SAMPLES / "trtllm_eval_longbench_v1.json") == 25.0


def test_json_without_the_score(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no score of gpqa_diamond_cot_zeroshot_aa"):
        read_eval_json("gpqa_diamond", SAMPLES / "trtllm_eval_gsm8k.json")
    with pytest.raises(ReportError, match="wrote no report"):
        read_eval_json("gsm8k", tmp_path / "none.json")
    with pytest.raises(ReportError, match="mmlu writes no JSON report"):
        read_eval_json("mmlu", tmp_path / "none.json")


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


def test_bench_log_holds_the_same_figures() -> None:
    report = read_bench_report(SAMPLES / "trtllm_bench_mtp1.json")
    log = read_bench_log(_text("trtllm_bench_mtp1.log"))
    assert log == {**report, "acceptance": 0.44}


def test_bench_log_without_speculation_has_no_acceptance() -> None:
    text = _text("trtllm_bench_mtp1.log")
    cut = text[: text.index("= DECODING STATISTICS")]
    assert read_bench_log(cut)["acceptance"] is None
    with pytest.raises(ReportError, match="TPOT"):
        read_bench_log("Traceback (most recent call last):\n")


def _change(name: str, path: Path, change: Any) -> Path:
    data = json.loads(_text(name))
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_unusable_bench_reports(tmp_path: Path) -> None:
    name, path = "trtllm_bench_mtp0.json", tmp_path / "report.json"
    with pytest.raises(ReportError, match="TPOT is reported with --streaming only"):
        read_bench_report(_change(name, path, lambda data: data.pop("streaming_metrics")))
    with pytest.raises(ReportError, match="no 'avg_tpot_ms' in it"):
        read_bench_report(_change(name, path, lambda data: data["streaming_metrics"].pop("avg_tpot_ms")))
    with pytest.raises(ReportError, match="avg_tpot_ms: wanted a positive number, got 0"):
        read_bench_report(_change(name, path, lambda data: data["streaming_metrics"].update(avg_tpot_ms=0.0)))
    path.write_text('{"half": ')
    with pytest.raises(ReportError, match="is not JSON"):
        read_bench_report(path)
    path.write_text("[]")
    with pytest.raises(ReportError, match="wanted a JSON object, got list"):
        read_bench_report(path)


def _client_report(path: Path, **change: Any) -> Path:
    data = {
        "mean_tpot_ms": 5.0,
        "mean_ttft_ms": 50.0,
        "mean_output_tokens": 8.0,
        "tokens_per_step": 2.5,
        "token_source": "usage",
        "requests": [{}, {}],
        **change,
    }
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "absent"}))
    return path


def test_client_report_turns_tokens_per_step_into_acceptance(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    figures = read_client_report(_client_report(path), 3)
    assert figures == {
        "tpot_ms": 5.0,
        "ttft_ms": 50.0,
        "acceptance": 0.5,
        "requests": 2,
        "output_tokens": 8.0,
    }
    assert read_client_report(path, 0)["acceptance"] is None
    assert read_client_report(_client_report(path, tokens_per_step=None), 3)["acceptance"] is None


def test_client_report_refuses_chunk_counts_under_speculation(tmp_path: Path) -> None:
    path = _client_report(tmp_path / "report.json", token_source="chunks")
    assert read_client_report(path, 0)["tpot_ms"] == 5.0
    with pytest.raises(ReportError, match="one chunk holds several tokens"):
        read_client_report(path, 1)
    with pytest.raises(ReportError, match="no 'mean_tpot_ms' in it"):
        read_client_report(_client_report(path, mean_tpot_ms="absent"), 0)


BAD_NUMBERS = [None, True, "22.1", float("nan"), float("inf"), -3, [], 10**400]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 250], ids=lambda value: str(value)[:9])
def test_impossible_scores_in_json_are_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "report.json"
    name = "trtllm_eval_gsm8k.json"

    def change(data: Any) -> None:
        (section,) = data["results"].values()
        section[next(key for key in section if "," in key and "_stderr" not in key)] = value

    with pytest.raises(ReportError, match=r"report\.json: \S+: wanted 0 to 100, got "):
        read_eval_json("gsm8k", _change(name, path, change))

    def change_group(data: Any) -> None:
        data["groups"][data["group_subtasks"]["longbench"][0]]["score,none"] = value

    if value is not None:  # null is a group without a score
        with pytest.raises(ReportError, match=r"wanted 0 to 1, got "):
            read_eval_json("longbench_v1", _change("trtllm_eval_longbench_v1.json", path, change_group))


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=lambda value: str(value)[:9])
def test_impossible_figures_in_bench_reports_are_refused(tmp_path: Path, value: Any) -> None:
    name, path = "trtllm_bench_mtp1.json", tmp_path / "report.json"
    places = [
        lambda data: data["streaming_metrics"].update(avg_tpot_ms=value),
        lambda data: data["streaming_metrics"].update(avg_ttft_ms=value),
        lambda data: data["request_info"].update(num_requests=value),
        lambda data: data["decoding_stats"]["draft_acceptance_rate_percentiles"].update(average=value),
    ]
    for change in places:
        with pytest.raises(ReportError, match="wanted"):
            read_bench_report(_change(name, path, change))
    for key in ("mean_tpot_ms", "mean_ttft_ms", "mean_output_tokens"):
        with pytest.raises(ReportError, match=f"{key}: wanted a number of at least 0, got"):
            read_client_report(_client_report(path, **{key: value}), 0)


@pytest.mark.parametrize("section", ["decoding_stats", "request_info", "streaming_metrics"])
@pytest.mark.parametrize("value", [None, 3, "x", []])
def test_sections_of_another_type_are_reports_without_figures(
    tmp_path: Path, section: str, value: Any
) -> None:
    path = _change("trtllm_bench_mtp1.json", tmp_path / "r.json", lambda data: data.update({section: value}))
    if section == "decoding_stats" and value is None:
        assert read_bench_report(path)["acceptance"] is None
    else:
        with pytest.raises(ReportError, match=r"r\.json"):
            read_bench_report(path)


@pytest.mark.parametrize("value", [None, 3, [], "x", {"gsm8k": None}, {"gsm8k": [1]}])
def test_results_of_another_type_hold_no_score(tmp_path: Path, value: Any) -> None:
    path = _change("trtllm_eval_gsm8k.json", tmp_path / "r.json", lambda data: data.update(results=value))
    with pytest.raises(ReportError, match=r"r\.json"):
        read_eval_json("gsm8k", path)


@pytest.mark.parametrize(
    ("per_step", "fits"), [(1.0, True), (4.0, True), (0.5, False), (4.5, False), ("2", False)]
)
def test_tokens_per_step_lie_between_one_and_all_drafts(tmp_path: Path, per_step: Any, fits: bool) -> None:
    path = _client_report(tmp_path / "report.json", tokens_per_step=per_step)
    if fits:
        assert read_client_report(path, 3)["acceptance"] == (per_step - 1) / 3
    else:
        with pytest.raises(ReportError, match="tokens_per_step: wanted 1 to 4"):
            read_client_report(path, 3)


@pytest.mark.parametrize("requests", [None, [], 2, "absent"])
def test_a_client_report_without_requests_is_refused(tmp_path: Path, requests: Any) -> None:
    with pytest.raises(ReportError, match="requests: wanted a list"):
        read_client_report(_client_report(tmp_path / "report.json", requests=requests), 0)


def test_json_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ReportError, match="is not JSON"):
        read_bench_report(path)
