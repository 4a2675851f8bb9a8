"""The figures of docs/engine_evidence.md are those of the result files, and later files add theirs."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.report import vllm_report
from eval.report.provenance import Results
from eval.report.vllm_report import in_engine, prefill_times, sampling_times, total_compared, vllm_figures

MACHINE = {"commit": "abc1234", "device": "NVIDIA H200"}
PREFILL = ("prefill_rows", "prefill_rows_that_differ", "prefill_rows_seen")
COUNTS = ("rows", "rows_that_differ", *PREFILL, "numpy_rows")


def _engine(part: str, **more: Any) -> dict[str, Any]:
    return {"part": part, "mode": "compare", "graphs": "full", "drafts": 0, "chunk": 8192, "cases": []} | more


def _trial(*engines: dict[str, Any], **more: Any) -> dict[str, Any]:
    versions, setup = {"vllm": "0.33.0"}, {"max_model_len": 4096}
    return {"versions": versions, "machine": MACHINE, "setup": setup, "engines": list(engines)} | more


def _write(folder: Path, **files: Any) -> str:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return vllm_figures(folder)


def test_nothing_measured_is_nothing_said(tmp_path: Path) -> None:
    folder = tmp_path / "h1"
    files = Results(folder)
    assert _write(folder) == "" and total_compared(files) is None and in_engine(files) is None


def test_rows_that_differ_are_told_and_those_of_one_gpu_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = dict(zip(COUNTS, (9000, 1, 70, 2, 100, 6), strict=True))
    other = _trial(_engine("cases", compared=compared), machine=MACHINE | {"device": "OTHER"})
    _write(tmp_path / "h2", vllm_trial_a=other)
    assert "| OTHER | FULL graphs | 9,000 | 70 of 100 | 3 |" in _write(tmp_path / "h1")
    _write(tmp_path / "h1", vllm_trial_b=_trial(_engine("cases", compared=compared | {"rows": 7})))
    counts = {"decode": 7, "prefill": 70, "seen": 100, "differ": 3}
    files = Results(tmp_path / "h1")
    assert total_compared(files) == counts | {"source": "NVIDIA H200, commit abc1234"}
    assert files.quoted == {"vllm_trial_b.json": {"abc1234"}}
    for name, (date, commit, rows) in {"c": ("2026", "def5678", 2), "d": ("2025", "aaa1234", 9)}.items():
        machine = MACHINE | {"date": date, "commit": commit}
        engine = _engine("cases", compared=compared | {"rows": rows})
        _write(tmp_path / "h3", **{f"vllm_trial_{name}": _trial(engine, machine=machine)})
    today: set[str] = set()
    monkeypatch.setattr(vllm_report, "is_of_today", lambda trial, folder: trial["machine"]["commit"] in today)
    last = total_compared(Results(tmp_path / "h3"))
    assert last is not None and last["decode"] == 2 and last["source"].endswith("commit def5678")
    today.add("aaa1234")
    every = total_compared(Results(tmp_path / "h3"))
    assert every is not None and every["decode"] == 11 and every["source"].endswith("aaa1234, def5678")


@pytest.mark.parametrize(
    ("ours", "ms"),
    [
        ([(9, 40, 1), (1, 40, 1)], 8.0),
        ([(4, 40, 2), (2, 40, 1)], 12.0),
        ([(10, 40, 1)], None),  # more scores than vLLM's budget, so computed in the call
        ([(9, 40, 1)], None),  # a row less
    ],
)
def test_times_of_prefill_are_those_of_the_same_rows(ours: list[tuple[int, int, int]], ms: float) -> None:
    sides = [
        [{"rows": rows, "width": width, "calls": n, "us_median": 4000.0} for rows, width, n in shapes]
        for shapes in ([(9, 40, 1), (1, 40, 1)], ours)
    ]
    assert prefill_times(*sides) == ({} if ms is None else {"stock": 8.0, "ours": ms})


def test_a_batch_whose_sides_had_other_rows_has_no_times() -> None:
    case = {"batch": 64, "kind": "mixed", "gpu_us": 9, "host_us": 300, "decode_ms_median": 2.0}
    for rows, known in (((64, 64), True), ((64, 65), False), ((64,), False)):
        cases = [
            case | {"side": side, "rows": each} for side, each in zip(("stock", "ours"), rows, strict=False)
        ]
        assert bool(sampling_times([_trial(_engine("sampler", mode="ours", cases=cases))])) is known
