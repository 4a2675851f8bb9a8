"""Read what trtllm-eval, trtllm-bench and ``vllm bench serve`` report.

Formats follow the 1.2 releases of TensorRT-LLM: ``tensorrt_llm/evaluate``,
``tensorrt_llm/bench/dataclasses/reporting.py``, and vLLM 0.33's ``vllm/benchmarks/serve.py``. Every reader
returns plain figures and raises `ReportError` with what was looked for.
"""

import re
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AliasPath, BaseModel, Field, ValidationError

Figures = dict[str, float | None]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Report = TypeVar("Report", bound=BaseModel)

_NUMBER = r"(-?\d+(?:\.\d+)?)"
EVAL_TASKS = {
    "mmlu": rf"MMLU weighted average accuracy: {_NUMBER}",
    "gsm8k": rf"lm-eval gsm8k average accuracy: {_NUMBER}",
    "gpqa_diamond": rf"lm-eval gpqa_diamond\w* average accuracy: {_NUMBER}",
    "longbench_v1": rf"lm-eval longbench average 'score' across \d+ subgroups: {_NUMBER}",
}
"""Tasks of the paper's table (section 6.6), and the line of the log with the score in per cent."""


class ReportError(ValueError):
    """A report or log does not hold the figures that were looked for."""


class BenchReport(BaseModel, strict=True):
    """Figures of what ``trtllm-bench throughput --streaming --report_json`` writes."""

    tpot_ms: Positive = Field(validation_alias=AliasPath("streaming_metrics", "avg_tpot_ms"))
    ttft_ms: Positive = Field(validation_alias=AliasPath("streaming_metrics", "avg_ttft_ms"))
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, validation_alias=AliasPath("decoding_stats", "draft_acceptance_rate_percentiles", "average")
    )
    requests: Count = Field(validation_alias=AliasPath("request_info", "num_requests"))
    output_tokens: Positive = Field(validation_alias=AliasPath("request_info", "avg_output_length"))


class ServeReport(BaseModel, strict=True):
    """What ``vllm bench serve --save-result`` writes; means over the requests."""

    completed: Count
    failed: Annotated[int, Field(ge=0, le=0)]
    mean_tpot_ms: Positive
    mean_ttft_ms: Positive
    total_output_tokens: Count
    spec_decode_acceptance_rate: Annotated[float, Field(ge=0, le=100)] | None = None  # per cent


def read_eval_log(task: str, text: str) -> Figures:
    """Score in per cent from the output of ``trtllm-eval ... <task>``; the last summary line counts."""
    if not (found := re.findall(EVAL_TASKS[task], text)):
        raise ReportError(f"the log holds no score of {task} (looked for '{EVAL_TASKS[task]}')")
    if not 0 <= float(found[-1]) <= 100:
        raise ReportError(f"score of {task}: wanted 0 to 100, got {found[-1]}")
    return {"score": float(found[-1])}


def read_bench_report(path: Path) -> Figures:
    """Means over the requests; ``acceptance`` is the share of draft tokens accepted, None without any."""
    return _read(BenchReport, path).model_dump()


def read_serve_report(path: Path) -> Figures:
    """Figures as of `read_bench_report` from ``vllm bench serve``; no request may have failed."""
    data = _read(ServeReport, path)
    rate = data.spec_decode_acceptance_rate
    return {
        "tpot_ms": data.mean_tpot_ms,
        "ttft_ms": data.mean_ttft_ms,
        "acceptance": None if rate is None else rate / 100,
        "requests": data.completed,
        "output_tokens": data.total_output_tokens / data.completed,
    }


def _read(kind: type[Report], path: Path) -> Report:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ReportError(f"it wrote no report at {path}") from None
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "it"
        raise ReportError(f"{path}: {name}: {first['msg']}") from None
