"""The report shows the replay's own figures beside the published ones, and its plots are not empty."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console
from rows import DecodeRows

from gvr_topk.config import parse_config
from gvr_topk.constants import GuessSource
from gvr_topk.evaluation import report
from gvr_topk.evaluation.replay import ReplayResult, StepStats, replay

pytestmark = pytest.mark.filterwarnings("error")

ON = parse_config(
    {"sparse_attention_config": {"algorithm": "dsa", "index_topk": 512, "enable_heuristic_topk": True}}
)


@pytest.fixture(scope="module")
def result() -> ReplayResult:
    return replay(DecodeRows(17_000, name="normal"), ON, paper=True)


def text_of(result: ReplayResult, build: Any = report.build_table) -> str:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as capture:
        console.print(build(result))
    return capture.get()


def row_of(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {label}")]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def with_kernels(result: ReplayResult) -> ReplayResult:
    """The same replay, as if kernels had counted: the second of three steps has missed its interval."""

    def row(step: int, path: int, stats: StepStats) -> StepStats:
        missed = step == 2 or path == 2
        guess = (GuessSource.VALUE, GuessSource.ROW_SAMPLE, GuessSource.NONE)[path]
        return replace(
            stats, passes=1 + 2 * missed, candidates=300 * step + path, guess=guess,
            guess_hit=int(not missed), done=int(missed),
        )  # fmt: skip

    records = tuple(
        replace(record, paths=tuple(row(record.step, path, each) for path, each in enumerate(record.paths)))
        for record in result.records
    )
    return replace(result, records=records, device="a GPU")


def test_a_cpu_reports_only_what_it_has_measured(result: ReplayResult) -> None:
    text = text_of(result)
    assert "normal: 4 steps, n 17,000 to 17,003, k 512, cpu" in text
    (head,) = [line for line in text.splitlines() if line.startswith("┃")]
    assert [cell.strip() for cell in head.strip("┃").split("┃")][1:] == ["auto*", "no_hint", "radix_rounds"]
    rows = [[record.paths[path] for record in result.records[1:]] for path in range(3)]
    assert row_of(text, "steps") == ["3"] * 3
    assert row_of(text, "hint used") == ["100.0 %", "0.0 %", "0.0 %"]
    ratio = sum(row.hits for row in rows[0]) / 3 / 512
    assert row_of(text, "last step's choice")[0] == f"{100 * ratio:.1f} %"
    assert 0.5 < ratio < 1
    assert len([line for line in text.splitlines() if line.startswith("│")]) == 3
    assert "Only kernels predict and count" in " ".join(text.split())


def test_a_gpu_reports_what_its_kernels_counted(result: ReplayResult) -> None:
    text = text_of(with_kernels(result))
    assert row_of(text, "steps") == ["3"] * 3
    assert row_of(text, "interval held") == ["66.7 %", "66.7 %", "-"]
    assert row_of(text, "missed: second look") == ["1", "1", "0"]
    assert row_of(text, "radix rounds") == ["1", "1", "3"]
    assert row_of(text, "mean passes") == ["1.67", "1.67", "3.00"]
    assert row_of(text, "mean candidates") == ["600", "601", "602"]
    assert row_of(text, "most candidates") == ["900", "901", "902"]
    assert "Candidates are the scores in the interval" in " ".join(text.split())


def test_paper_table_has_the_replays_figures(result: ReplayResult) -> None:
    text = text_of(result, report.build_paper_table)
    assert row_of(text, "steps")[0] == "3"
    for label, figure in (("hit ratio", "hit_ratio_mean"), ("within 5 snaps", "snap_within_5")):
        summaries = [report.summarize(result.hinted(index)) for index in range(4)]
        assert row_of(text, label)[:4] == [f"{100 * summary[figure]:.1f} %" for summary in summaries]
    passes = [row.passes for row in result.hinted(0)]
    assert row_of(text, "most passes")[0] == str(max(passes))
    assert row_of(text, "of a random hint")[0] == "3.0 %"


def test_outcome_counts_gate_decisions_and_exact_steps(result: ReplayResult) -> None:
    assert report.describe_outcome(result) == [
        "gate: used 3, first_step 1",
        "op: used 3, first_step 1",
        "exact: op on every path 4 of 4 steps, the paper's four phases 4 of 4 steps",
        "oracle: a sort in NumPy, which shares no code with the op",
        "the op ran its CPU implementation: no kernel ran (--device cuda runs them)",
    ]
    first, *others = result.records
    broken = replace(result, records=(replace(first, exact=False, gate="too_short"), *others))
    assert report.describe_outcome(broken)[0] == "gate: used 3, too_short 1"
    assert report.describe_outcome(broken)[2].startswith("exact: op on every path 3 of 4 steps, the paper's")


def test_plots_and_json_are_written(result: ReplayResult, tmp_path: Path) -> None:
    paths = report.save_plots(with_kernels(result), tmp_path)
    names = ["hit_ratio", "candidates", "passes"]
    assert [path.name for path in paths] == [f"normal_{name}.png" for name in names]
    for path in paths:
        pixels = imread(path)
        assert pixels.shape[0] >= 600 and pixels.shape[1] >= 1000
        assert (pixels[..., :3] < 0.9).any(axis=2).mean() > 0.01, f"{path.name} is blank"
    saved = report.save_json(result, tmp_path)
    assert json.loads(saved.read_text()) == json.loads(json.dumps(result.to_dict()))
