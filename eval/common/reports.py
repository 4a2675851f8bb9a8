"""Read what trtllm-eval, trtllm-bench and our streaming client report.

Formats follow the 1.2 releases of TensorRT-LLM: ``tensorrt_llm/evaluate``,
``tensorrt_llm/bench/dataclasses/reporting.py``. JSON is read where a tool writes it; a log is read where
it does not. Every reader returns plain figures and raises `ReportError` with what was looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ReportError(ValueError):
    """A report or log does not hold the figures that were looked for."""


@dataclass(frozen=True)
class EvalTask:
    """How one task of trtllm-eval reports its score.

    Attributes
    ----------
    name : str
        Subcommand.
    summary : re.Pattern
        Line with the final score in per cent, group 1.
    harness_task : str or None
        Name in lm-eval's result table; None for a task that does not use lm-eval.
    """

    name: str
    summary: re.Pattern[str]
    harness_task: str | None


_NUMBER = r"(-?\d+(?:\.\d+)?)"

EVAL_TASKS = {
    task.name: task
    for task in (
        EvalTask("mmlu", re.compile(rf"MMLU weighted average accuracy: {_NUMBER}"), None),
        EvalTask("gsm8k", re.compile(rf"lm-eval gsm8k average accuracy: {_NUMBER}"), "gsm8k"),
        EvalTask(
            "gpqa_diamond",
            re.compile(rf"lm-eval gpqa_diamond\w* average accuracy: {_NUMBER}"),
            "gpqa_diamond_cot_zeroshot_aa",
        ),
        EvalTask(
            "longbench_v1",
            re.compile(rf"lm-eval longbench average 'score' across \d+ subgroups: {_NUMBER}"),
            "longbench",
        ),
    )
}
"""Tasks of the paper's table (section 6.6)."""


def read_eval_log(task: str, text: str) -> float:
    """Score in per cent from the output of ``trtllm-eval ... <task>``.

    The last summary line counts. Releases that end with lm-eval's table only are read from the table:
    the mean over its metrics, which is what the summary line of later releases holds.

    Raises
    ------
    ReportError
        No summary line and no usable table, or a score outside 0 to 100.
    """
    description = EVAL_TASKS[task]
    found = description.summary.findall(text)
    if found:
        score = float(found[-1])
    else:
        values = _harness_table(text, description.harness_task)
        # LongBench's table lists groups and subtasks of several depths: no mean over it is the score.
        if not values or task == "longbench_v1":
            raise ReportError(
                f"the log holds no score of {task} (looked for '{description.summary.pattern}')"
            )
        score = sum(values) / len(values)
    if not 0 <= score <= 100:
        raise ReportError(f"score of {task}: wanted 0 to 100, got {score:g}")
    return score


def read_eval_json(task: str, path: Path) -> float:
    """Score in per cent from the file that ``--output_path`` makes lm-eval tasks write.

    The file keeps all digits, where the log rounds to two decimals.

    Raises
    ------
    ReportError
        No such file, not JSON, or no score of the task in it.
    """
    harness = EVAL_TASKS[task].harness_task
    if harness is None:
        raise ReportError(f"{task} writes no JSON report; its log is read")
    data = _load_json(path)
    if task == "longbench_v1":
        # The unweighted mean of the subgroups' "score,none", kept as a fraction.
        groups = data.get("groups", {})
        names = data.get("group_subtasks", {}).get(harness, [])
        scores = [groups[name]["score,none"] for name in names if "score,none" in groups.get(name, {})]
        factor = 100.0
    else:
        results = data.get("results", {}).get(harness, {})
        scores = [
            value
            for metric, value in results.items()
            if isinstance(value, int | float) and "," in metric and "_stderr" not in metric
        ]
        factor = 1.0  # trtllm-eval has scaled these before it writes the file
    if not scores:
        raise ReportError(f"{path}: no score of {harness} in it")
    return factor * sum(scores) / len(scores)


def read_bench_report(path: Path) -> dict[str, Any]:
    """Figures of one ``trtllm-bench throughput --streaming --report_json`` file.

    Returns
    -------
    dict
        ``tpot_ms``, ``ttft_ms`` (means over requests), ``acceptance`` (share of draft tokens accepted,
        mean over requests; None without speculative decoding), ``requests``, ``output_tokens`` (mean per
        request).

    Raises
    ------
    ReportError
        No such file, not JSON, or no streaming metrics in it.
    """
    data = _load_json(path)
    streaming = data.get("streaming_metrics")
    if not isinstance(streaming, Mapping):
        raise ReportError(f"{path}: no 'streaming_metrics'; TPOT is reported with --streaming only")
    decoding = data.get("decoding_stats") or {}
    rates = decoding.get("draft_acceptance_rate_percentiles") or {}
    request_info = data.get("request_info") or {}
    try:
        return {
            "tpot_ms": _positive(streaming["avg_tpot_ms"], f"{path}: avg_tpot_ms"),
            "ttft_ms": float(streaming["avg_ttft_ms"]),
            "acceptance": float(rates["average"]) if "average" in rates else None,
            "requests": int(request_info["num_requests"]),
            "output_tokens": float(request_info["avg_output_length"]),
        }
    except KeyError as error:
        raise ReportError(f"{path}: no {error} in it") from None


_BENCH_LINES = {
    "tpot_ms": re.compile(rf"^Average time-per-output-token \[TPOT\] \(ms\):\s+{_NUMBER}", re.MULTILINE),
    "ttft_ms": re.compile(rf"^Average time-to-first-token \[TTFT\] \(ms\):\s+{_NUMBER}", re.MULTILINE),
    "acceptance": re.compile(rf"^\[DAR\] AVERAGE\s*: {_NUMBER}", re.MULTILINE),
    "requests": re.compile(rf"^Number of requests:\s+{_NUMBER}", re.MULTILINE),
    "output_tokens": re.compile(rf"^Average Output Length \(tokens\):\s+{_NUMBER}", re.MULTILINE),
}


def read_bench_log(text: str) -> dict[str, Any]:
    """Figures of the summary that trtllm-bench prints; keys as in `read_bench_report`.

    For a log kept without its JSON report. Printed acceptance rates have two decimals.

    Raises
    ------
    ReportError
        No TPOT line.
    """
    found = {name: pattern.findall(text) for name, pattern in _BENCH_LINES.items()}
    last = {name: values[-1] if values else None for name, values in found.items()}
    if last["tpot_ms"] is None:
        raise ReportError("the log holds no 'Average time-per-output-token [TPOT] (ms)' line")
    figures = {name: None if text is None else float(text) for name, text in last.items()}
    _positive(figures["tpot_ms"], "TPOT in the log")
    return figures


def read_client_report(path: Path, draft_tokens: int) -> dict[str, Any]:
    """Figures of one report of ``eval/streaming_client.py``; keys as in `read_bench_report`.

    Parameters
    ----------
    path : Path
    draft_tokens : int
        Draft tokens per step of the server (the MTP setting), which turns the tokens per step that the
        server reports into a draft acceptance rate: ``(tokens per step - 1) / draft_tokens``.

    Raises
    ------
    ReportError
        No such file, not JSON, a missing figure, or token counts that speculative decoding makes wrong.
    """
    data = _load_json(path)
    try:
        if draft_tokens and data["token_source"] == "chunks":
            raise ReportError(
                f"{path}: the server sends no token usage; with MTP one chunk holds several tokens, so "
                "that counting chunks would give a wrong TPOT"
            )
        per_step = data["tokens_per_step"]
        return {
            "tpot_ms": _positive(data["mean_tpot_ms"], f"{path}: mean_tpot_ms"),
            "ttft_ms": float(data["mean_ttft_ms"]),
            "acceptance": (per_step - 1) / draft_tokens if draft_tokens and per_step is not None else None,
            "requests": len(data["requests"]),
            "output_tokens": float(data["mean_output_tokens"]),
        }
    except KeyError as error:
        raise ReportError(f"{path}: no {error} in it") from None


def _harness_table(text: str, task: str | None) -> list[float]:
    """Values of one task in the last table that lm-eval printed, in per cent."""
    if task is None:
        return []
    values: list[float] = []
    columns: list[str] = []
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Tasks" in cells[:1] and "Value" in cells:
            columns, values, inside = cells, [], False
            continue
        if not columns or not line.strip().startswith("|") or len(cells) != len(columns):
            continue
        name = cells[0].lstrip("- ")
        inside = name == task if name else inside  # an empty first cell continues the task above
        try:
            value = float(cells[columns.index("Value")])
        except ValueError:
            continue
        if inside:
            values.append(value)
    return values


def _load_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"it wrote no report at {path}") from None
    except ValueError as error:
        raise ReportError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ReportError(f"{path}: wanted a JSON object, got {type(data).__name__}")
    return data


def _positive(value: Any, name: str) -> float:
    number = float(value)
    if not number > 0:
        raise ReportError(f"{name}: wanted a positive number, got {value}")
    return number
