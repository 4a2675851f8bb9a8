"""The figures of docs/engine_evidence.md are those of the result files, and later files add theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.report import vllm_report
from eval.report.provenance import Results
from eval.report.vllm_report import in_engine, mixed_call, prefill_times, total_compared, vllm_figures

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


def test_compared_engines(tmp_path: Path) -> None:
    compared = dict(zip(COUNTS, (9000, 1, 70, 2, 100, 6), strict=True))
    cases = [{"length": 8192, "batch": batch} for batch in (1, 8, 32)]
    first = _engine("cases", compared=compared, cases=cases, drafts=1, tensor_parallel=2, churn=None)
    churn = {"requests": 50, "slots": 16}
    second = _engine("preemption", compared=compared, churn=churn, preemptions=4, graphs="eager")
    folder = tmp_path / "h1"
    said = _write(folder, vllm_trial_a=_trial(first, second, _engine("cases", compared=None)))
    # Both ranks of the first engine compare the same rows; what differs on either is told.
    assert "| FULL graphs, MTP 1, 2 GPUs, 1, 8 and 32 x 8,192 | 4,500 | 35 of 50 | 3 |" in said
    assert "| eager, 50 requests in 16 slots, 4 preemptions | 9,000 | 70 of 100 | 3 |" in said
    assert "NVIDIA H200, commit abc1234" in said and "; 9 of the rows were sorted by NumPy" in said
    files = Results(folder)
    counts = {"decode": 13500, "prefill": 105, "seen": 150, "differ": 6}
    assert total_compared(files) == counts | {"source": "NVIDIA H200, commit abc1234"}
    assert files.quoted == {"vllm_trial_a.json": {"abc1234"}}
    # Ranks that share the rows of prompts compare other ones.
    shared = first | {"row_shards": True, "cases": [case | {"cached": 3000} for case in cases]}
    said = _write(folder, vllm_trial_a=_trial(shared))
    told = "2 GPUs, each with its share of the prompts' rows, 1, 8 and 32 x 8,192, 9,000 tokens cached"
    assert f"| FULL graphs, MTP 1, {told} | 4,500 | 70 of 100 | 3 |" in said


def test_rows_of_all_gpus_stand_in_one_table_and_those_of_one_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = dict.fromkeys(COUNTS, 0)
    other = _trial(_engine("cases", compared=compared | {"rows": 5}), machine=MACHINE | {"device": "OTHER"})
    _write(tmp_path / "h2", vllm_trial_a=other)
    assert "| OTHER | FULL graphs | 5 | 0 of 0 | 0 |" in _write(tmp_path / "h1")
    said = _write(tmp_path / "h1", vllm_trial_b=_trial(_engine("cases", compared=compared | {"rows": 7})))
    assert said.index("| H200 | FULL graphs | 7 | 0 of 0 | 0 |") < said.index("| OTHER | FULL graphs | 5 |")
    said = " ".join(said.split())
    assert "NVIDIA H200, commit abc1234; OTHER, commit abc1234 (`vllm_trial_*.json`)" in said
    total = total_compared(Results(tmp_path / "h1"))
    assert total is not None and total["decode"] == 7 and "OTHER" not in total["source"]
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


def test_turns_of_both_samplers_are_averaged(tmp_path: Path) -> None:
    """And a batch whose sides had other rows has no times."""
    case = {"batch": 64, "kind": "mixed", "rows": 64, "host_us": 300, "decode_ms_median": 2.0}
    sides = [("stock", 600), ("ours", 100), ("ours", 120), ("stock", 640)]
    cases = [case | {"side": side, "gpu_us": us} for side, us in sides]
    cases += [{**one, "batch": 8, "rows": 8 + at} for at, one in enumerate(cases)]
    engine = _engine("sampler", mode="ours", cases=cases)
    other = _trial(engine, streams=[], machine=MACHINE | {"device": "OTHER"})
    said = _write(tmp_path / "h1", vllm_sampler_times=_trial(engine, streams=[]), vllm_sampler_masks=other)
    said = " ".join(said.split())
    assert said.count("| none | 64 | mixed | 620 | 110 | 300 | 300 | 2.00 | 2.00 |") == 2
    assert said.index("in one engine, NVIDIA H200, commit abc1234.") < said.index("in one engine, OTHER,")
    assert "| none | 8 |" not in said
    mixed = mixed_call(Results(tmp_path / "h1"))
    assert mixed is not None and (mixed["stock"], mixed["ours"]) == (620, 110)


def test_every_server_has_its_time(tmp_path: Path) -> None:
    one = {"case": {"MTP": 0}, "off": [3, 2.0], "on": [2.5, 1.5], "acceptance_off": [], "acceptance_on": []}
    one |= {"decision": {"verdict": "faster"}}
    drafts = one | {"case": {"MTP": 3}, "acceptance_off": [0.5, 0.25], "acceptance_on": [0.5, 0.5]}
    cases = [{"parameters": "k = 50", "decisions": [one, drafts], "failures": []}]
    campaign = {"machine": MACHINE, "what": "2 dense layers", "cases": cases}
    said = _write(tmp_path / "h1", vllm_tpot_a=campaign)
    assert "| 2 | none | k = 50 | faster | 3.000, 2.000 | 2.500, 1.500 | -20.0 %, -25.0 % | - | - |" in said
    times = "3.000, 2.000 | 2.500, 1.500 | -20.0 %, -25.0 %"
    assert f"| 2 | 3 | k = 50 | faster | {times} | 38 % | 50 % |" in said
    assert "NVIDIA H200, commit abc1234 (`vllm_tpot_*.json`" in " ".join(said.split())
