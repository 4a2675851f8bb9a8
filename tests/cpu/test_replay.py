"""A replay runs what serving runs, and its verdict and figures can be trusted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from rows import DecodeRows

from gvr_topk import contract, cpu
from gvr_topk.config import parse_config
from gvr_topk.constants import GuessSource, HintReason, StatsColumn
from gvr_topk.evaluation import replay as replay_module
from gvr_topk.evaluation.paper_reference import topk_row
from gvr_topk.evaluation.replay import StepStats, replay, summarize, summarize_path
from gvr_topk.evaluation.trace import shipped_trace

K = 512


def config(enabled: bool = True, **options: Any):  # type: ignore[no-untyped-def]
    section = {"algorithm": "dsa", "index_topk": K, "enable_heuristic_topk": enabled}
    return parse_config({"sparse_attention_config": section, "gvr_topk": options})


def test_shipped_trace_hit_ratio_is_the_overlap_of_consecutive_results() -> None:
    trace = shipped_trace()
    result = replay(trace, config(), k=2048, steps=4, paper=True)
    assert result.is_exact and result.exact_steps == 4
    tops = [set(np.argsort(-trace.scores(step), kind="stable")[:2048].tolist()) for step in range(4)]
    for step in range(1, 4):
        assert {row.hits for row in result.records[step].paths} == {len(tops[step - 1] & tops[step])}
        for offset in (0, 1):
            shifted = {position + offset for position in tops[step - 1]}
            ratio = len(shifted & tops[step]) / 2048
            for index, variant in enumerate(result.variants):
                if variant.hint_offset == offset:
                    assert result.records[step].variants[index].hit_ratio == ratio
    assert [record.length for record in result.records] == [32513, 32514, 32515, 32516]
    first, *later = [record.op_stats.reason for record in result.records]
    assert first == HintReason.FIRST_STEP and later == [HintReason.USED] * 3


def test_first_step_has_no_hint_and_is_left_out_of_the_statistics() -> None:
    """Progress is told after every step, and threads are given back in the end."""
    seen: list[int] = []
    threads = torch.get_num_threads()
    result = replay(DecodeRows(steps=3), config(), paper=True, on_step=seen.append)
    assert seen == [1, 2, 3] and torch.get_num_threads() == threads
    assert len(result.selected(0)) == 2
    assert [record.variants[0].hint_valid for record in result.records] == [0, K, K]
    assert len(result.hinted(0)) == 2


def test_each_path_carries_a_state_of_its_own_from_step_to_step() -> None:
    rows = DecodeRows(steps=3)
    result = replay(rows, config())
    assert [[row.reason for row in record.paths] for record in result.records] == [
        [HintReason.FIRST_STEP, HintReason.DISABLED, HintReason.DISABLED],
        *2 * [[HintReason.USED, HintReason.DISABLED, HintReason.DISABLED]],
    ]
    off = replay(rows, config(enabled=False))
    assert {record.paths[0].reason for record in off.records} == {HintReason.NO_STATE}


def test_a_wrong_path_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip_one(logits: torch.Tensor, n: int, out: torch.Tensor) -> None:
        if calls[-1]["path"] == "no_hint":
            out.copy_(out.flip(1))

    calls = _replace_op(monkeypatch, flip_one)
    result = replay(DecodeRows(steps=2), config())
    assert result.exact_steps == 0
    assert [call["path"] for call in calls] == ["auto", "auto", "no_hint", "radix_rounds"] * 2


def test_a_wrong_model_of_the_paper_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **others: Any) -> Any:
        result = topk_row(*arguments, **others)
        return dataclasses.replace(result, indices=result.indices[::-1])

    monkeypatch.setattr(replay_module, "topk_row", wrong)
    result = replay(DecodeRows(steps=2), config(), paper=True)
    assert all(record.exact for record in result.records) and result.exact_steps == 0


def test_statistics_of_kernels_are_read_and_summed() -> None:
    """A CPU counts none, so the columns and sums are those of rows written by hand."""
    hit = [HintReason.USED, 1, 300, 0, 256, GuessSource.VALUE, 1, 0]
    missed = [HintReason.FIRST_STEP, 4, 100, 5, 256, GuessSource.ROW_SAMPLE, 0, 2]
    rows = [StepStats.of(torch.tensor(each)) for each in (hit, missed)]
    assert rows[1] == StepStats(HintReason.FIRST_STEP, 4, 100, 5, 256, GuessSource.ROW_SAMPLE, 0, 2)
    assert summarize_path(rows, K) == {
        "rows": 2, "hit_ratio": 0.5, "used": 0.5, "interval_held": 0.5, "missed": 1, "radix_rounds": 1,
        "passes_mean": 2.5, "candidates_mean": 200, "candidates_max": 300,
    }  # fmt: skip


def _replace_op(monkeypatch: pytest.MonkeyPatch, change):  # type: ignore[no-untyped-def]
    real = replay_module.indexer_topk_decode
    calls: list[dict[str, Any]] = []

    def op(logits, seq_lens, k, **kwargs):  # type: ignore[no-untyped-def]
        before = {name: kwargs[name].clone() for name in ("out", "row_slot") if kwargs[name] is not None}
        calls.append({**kwargs, **before, "logits": logits.clone()})
        real(logits, seq_lens, k, **kwargs)
        change(logits, int(seq_lens[0]), kwargs["out"])
        return kwargs["out"]

    monkeypatch.setattr(replay_module, "indexer_topk_decode", op)
    return calls


@pytest.mark.parametrize(
    "change",
    [
        lambda logits, n, out: out.copy_(out.flip(1)),
        lambda logits, n, out: out[0, 3].fill_(n),
        lambda logits, n, out: out.fill_(-7),
    ],
    ids=["order", "past the row", "not written"],
)
def test_a_wrong_result_is_not_called_exact(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    _replace_op(monkeypatch, change)
    result = replay(DecodeRows(steps=2), config())
    assert result.exact_steps == 0 and not result.is_exact


def test_the_oracle_is_independent_of_the_cpu_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in what the op computes with on a CPU must show, not stand on both sides."""
    real = cpu.exact_topk

    def wrong(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return real(-logits, *arguments)

    for module in (cpu, contract):
        monkeypatch.setattr(module, "exact_topk", wrong)
    result = replay(DecodeRows(steps=2), config())
    assert [record.exact for record in result.records] == [False, False]


def test_buffers_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _replace_op(monkeypatch, lambda logits, n, out: None)
    replay(DecodeRows(n=20_000, steps=2), config())
    assert len(calls) == 8  # as configured, and on three paths
    for step, call in ((index // 4, call) for index, call in enumerate(calls)):
        assert call["logits"].shape[1] > 20_001
        assert torch.isnan(call["logits"][0, 20_000 + step :]).all()
        assert not torch.isnan(call["logits"][0, : 20_000 + step]).any()
        assert (call["out"] == -7).all()


def test_heuristic_off_uses_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _replace_op(monkeypatch, lambda logits, n, out: None)
    result = replay(DecodeRows(steps=3), config(enabled=False), paper=True)
    assert {record.gate for record in result.records} == {"disabled"}
    assert all(int(call["row_slot"][0]) == -1 for call in calls[::4])
    assert all(call["state"] is None for index, call in enumerate(calls) if index % 4)
    assert result.hinted(0) == [] and result.is_exact


def test_options_reach_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _replace_op(monkeypatch, lambda logits, n, out: None)
    result = replay(DecodeRows(steps=1), config(path="no_hint", hint_offset=3))
    assert (calls[0]["path"], calls[0]["hint_offset"]) == ("no_hint", 3)
    assert result.records[0].gate == "disabled" and not result.records[0].allowed
    assert int(calls[0]["row_slot"][0]) == 0  # the path reads no state, and leaves one like every other


@pytest.mark.parametrize(
    ("n", "options", "expected"),
    [
        (20_000, {}, ["first_step", "used", "used", "used"]),
        (2_000, {}, ["first_step", "used", "used", "used"]),
        (K - 2, {}, ["short_row", "short_row", "short_row", "first_step"]),
        (2_000, {"min_length": 2_001}, ["too_short", "first_step", "used", "used"]),
        (20_000, {"min_length": 20_002}, ["too_short", "too_short", "first_step", "used"]),
        (20_000, {"max_length": 20_001}, ["first_step", "used", "too_long", "too_long"]),
        (20_000, {"path": "paper_gvr"}, ["first_step", "used", "used", "used"]),
        (20_000, {"path": "radix_rounds"}, ["disabled"] * 4),
    ],
)
def test_gate_and_configured_lengths(n: int, options: dict[str, Any], expected: list[str]) -> None:
    result = replay(DecodeRows(n=n, steps=4), config(**options))
    assert [record.gate for record in result.records] == expected
    assert [record.allowed for record in result.records] == [reason == "used" for reason in expected]
    # The op knows no limits of lengths: to it, a row outside of them is one without a slot.
    of_op = ["no_slot" if reason in ("too_short", "too_long") else reason for reason in expected]
    assert [record.op_stats.reason.name.lower() for record in result.records] == of_op
    assert result.is_exact


def _stats(passes: int, candidates: int, snaps: int, hits: int):  # type: ignore[no-untyped-def]
    row = topk_row(np.arange(32, dtype=np.float32), 8, np.arange(16, 24)).stats
    changes = {"passes": passes, "candidates": candidates, "snap_iterations": snaps, "hit_ratio": hits / 8}
    return type(row)(**{**vars(row), **changes})


def test_summary_follows_the_papers_definitions() -> None:
    rows = [(1, 8, 99, 8), (1, 12, 5, 4), (2, 16, 9, 4), (3, 9, 6, 2), (4, 7, 99, 6), (6, 20, 8, 0)]
    summary = summarize([_stats(*row) for row in rows])
    assert summary["rows"] == 6
    assert summary["hit_ratio_mean"] == 0.5
    assert summary["passes_within"] == pytest.approx([2 / 6, 3 / 6, 4 / 6, 5 / 6])
    assert summary["passes_max"] == 6
    assert summary["candidates_mean"] == 12 and summary["candidates_median"] == 10.5
    # Snap figures are over rows with more than k candidates only: 5, 9, 6 and 8.
    assert summary["snap_within_5"] == pytest.approx(1 / 4)
    assert summary["snap_within_8"] == pytest.approx(3 / 4)
    assert summary["snap_max"] == 9
    nothing = summarize([])
    assert nothing["rows"] == 0 and nothing["passes_within"] == [None] * 4 and nothing["snap_max"] is None


def test_json_is_strict_and_complete() -> None:
    result = replay(DecodeRows(steps=2), config(), paper=True)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["format"] == "gvr_topk.replay/5"
    assert (data["steps"], data["exact_steps"], data["k"]) == (2, 2, K)
    assert data["variants"][0]["hit_ratio"] == [record.variants[0].hit_ratio for record in result.records]
    assert [data["paths"][path]["used"] for path in replay_module.PATHS] == [1, 0, 0]
    assert [record["gate"] for record in data["records"]] == ["first_step", "used"]
    assert list(data["records"][1]["op_stats"]) == [column.name.lower() for column in StatsColumn]
    assert len(data["records"][1]["variants"]) == 4
