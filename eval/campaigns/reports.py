"""Read what trtllm-eval, trtllm-bench and our streaming client report.

Formats follow the 1.2 releases of TensorRT-LLM: ``tensorrt_llm/evaluate``,
``tensorrt_llm/bench/dataclasses/reporting.py``. JSON is read where a tool writes it; a log is read where
it does not. Every reader returns plain figures and raises `ReportError` with what was looked for.
"""

from __future__ import annotations

import json
import math
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
    return _number(score, f"score of {task}", high=100)


def read_eval_json(task: str, path: Path) -> float:
    """Score in per cent from the file that ``--output_path`` makes lm-eval tasks write.

    The file keeps all digits, where the log rounds to two decimals.

    Raises
    ------
    ReportError
        No such file, not JSON, no score of the task in it, or one outside 0 to 100.
    """
    harness = EVAL_TASKS[task].harness_task
    if harness is None:
        raise ReportError(f"{task} writes no JSON report; its log is read")
    data = _load_json(path)
    if task == "longbench_v1":
        # The unweighted mean of the subgroups' "score,none", kept as a fraction.
        groups = _section(data, "groups", path)
        names = _section(data, "group_subtasks", path).get(harness) or []
        found = {str(name): _section(groups, name, path).get("score,none") for name in names}
        scores = {name: value for name, value in found.items() if value is not None}
        factor = 100.0
    else:
        results = _section(_section(data, "results", path), harness, path)
        # Beside the metrics the section holds an alias, and standard errors.
        scores = {name: value for name, value in results.items() if "," in name and "_stderr" not in name}
        factor = 1.0  # trtllm-eval has scaled these before it writes the file
    if not scores:
        raise ReportError(f"{path}: no score of {harness} in it")
    values = [factor * _number(value, f"{path}: {name}", high=100 / factor) for name, value in scores.items()]
    return sum(values) / len(values)


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
        No such file, not JSON, no streaming metrics in it, or figures that are none.
    """
    data = _load_json(path)
    streaming = data.get("streaming_metrics")
    if not isinstance(streaming, Mapping):
        raise ReportError(f"{path}: no 'streaming_metrics'; TPOT is reported with --streaming only")
    rates = _section(_section(data, "decoding_stats", path), "draft_acceptance_rate_percentiles", path)
    request_info = _section(data, "request_info", path)
    return {
        "tpot_ms": _positive(streaming, "avg_tpot_ms", path),
        "ttft_ms": _figure(streaming, "avg_ttft_ms", path),
        "acceptance": _figure(rates, "average", path, high=1) if "average" in rates else None,
        "requests": int(_figure(request_info, "num_requests", path)),
        "output_tokens": _figure(request_info, "avg_output_length", path),
    }


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
    figures = {
        name: None if text is None else _number(float(text), f"{name} in the log")
        for name, text in last.items()
    }
    if not figures["tpot_ms"]:
        raise ReportError(f"tpot_ms in the log: wanted a positive number, got {last['tpot_ms']}")
    return figures


def read_client_report(path: Path, draft_tokens: int) -> dict[str, Any]:
    """Figures of one report of ``eval/campaigns/streaming_client.py``; keys as in `read_bench_report`.

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
    if draft_tokens and data.get("token_source") != "usage":
        raise ReportError(
            f"{path}: the server sends no token usage; with MTP one chunk holds several tokens, so "
            "that counting chunks would give a wrong TPOT"
        )
    per_step = data.get("tokens_per_step")
    acceptance = None
    if draft_tokens and per_step is not None:
        acceptance = (_figure(data, "tokens_per_step", path, low=1, high=1 + draft_tokens) - 1) / draft_tokens
    requests = data.get("requests")
    if not isinstance(requests, list) or not requests:
        raise ReportError(f"{path}: requests: wanted a list of them, got {requests!r}")
    return {
        "tpot_ms": _positive(data, "mean_tpot_ms", path),
        "ttft_ms": _figure(data, "mean_ttft_ms", path),
        "acceptance": acceptance,
        "requests": len(requests),
        "output_tokens": _figure(data, "mean_output_tokens", path),
    }


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
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ReportError(f"{path}: wanted a JSON object, got {type(data).__name__}")
    return data


def _section(data: Mapping[str, Any], name: Any, path: Path) -> Mapping[str, Any]:
    """A part of a report; empty where it is absent or null."""
    section = data.get(name) if isinstance(name, str) else None
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ReportError(f"{path}: {name}: wanted a JSON object, got {section!r}")
    return section


def _figure(
    data: Mapping[str, Any], name: str, path: Path, *, low: float = 0.0, high: float = math.inf
) -> float:
    if name not in data:
        raise ReportError(f"{path}: no '{name}' in it")
    return _number(data[name], f"{path}: {name}", low=low, high=high)


def _positive(data: Mapping[str, Any], name: str, path: Path) -> float:
    number = _figure(data, name, path)
    if number == 0:
        raise ReportError(f"{path}: {name}: wanted a positive number, got {data[name]}")
    return number


def _number(value: Any, name: str, *, low: float = 0.0, high: float = math.inf) -> float:
    """A finite number in a range; JSON as Python reads it also has NaN, Infinity, null and true."""
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    wanted = f"a number of at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
    raise ReportError(f"{name}: wanted {wanted}, got {str(value)[:100]}")
