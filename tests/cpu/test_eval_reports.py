"""Reports and logs are read for the right figure, and refused when it is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.common.reports import (
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
        assert "Written by hand for the tests" in path.read_text(encoding="utf-8"), path.name


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
