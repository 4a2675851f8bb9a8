"""The stress runs' logic that needs no GPU: what is launched, compared, rewritten and reported."""

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from eval_fakes import Ended, run_verb

from eval.common.dtypes import DTYPES
from eval.common.paths import ROOT
from eval.fuzz.draw import Draw
from eval.stress import stress, stress_run, stress_workload
from eval.stress import stress_cases as cases
from eval.stress.stress_library import CHAOS_MODES, StressError, chaos_modes, launches_within, set_chaos
from eval.stress.stress_neighbours import Hang, make_rewriter, wait_for
from eval.stress.stress_workload import GUARD, POISON, Workload
from gvr_topk import sampling
from gvr_topk.policy import plan

STRESS = ROOT / "cpp" / "stress"

TINY = cases.Configuration("tiny", 600, 3, next_n=2, k=40, row_slot=True, stats=True, page_size=16, chains=2)
FULL = replace(TINY, name="full", counts=True, cache_slots=True)
PREFILL = cases.Configuration(
    "prefill", 600, 4, next_n=20, k=40, indices=False, row_slot=True, counts=True, stats=True, page_size=16,
    cache_slots=True, chains=2, op="prefill", offsets=True,
)  # fmt: skip
SLICES = replace(PREFILL, name="slices", stats=False, slices=3)
PLAIN = cases.Configuration("plain", 500, 2, k=30, dtype="bf16", aligned=False, chains=1)

SAMPLE = cases.Configuration(
    "sample", 600, 8, k=40, indices=False, row_slot=True, counts=True, aligned=False, chains=2, op="sample"
)

NOISE = replace(SAMPLE, counts=False, noise=True)
TOPK = cases.Configuration("topk", 600, 3, k=40, indices=False, chains=2, op="topk")

DECODE = [configuration for configuration in cases.CONFIGURATIONS if configuration.op == "decode"]


def family(c: cases.Configuration) -> str:
    if c.op != "decode":
        return c.op
    return plan(rows=c.rows, width=c.width, k=c.k, dtype=DTYPES[c.dtype], path=c.path).family


class TestConfigurations:
    def test_they_reach_every_kernel_and_dtype(self) -> None:
        families = {
            "small_row",
            "resident",
            "streaming",
            "fallback",
            "paper_gvr",
            "prefill",
            "sample",
            "topk",
        }
        assert {family(configuration) for configuration in cases.CONFIGURATIONS} == families
        assert {configuration.dtype for configuration in cases.CONFIGURATIONS} == set(DTYPES)
        assert {family(configuration) for configuration in cases.rewritten_configurations()} == families

    def test_they_use_every_argument(self) -> None:
        slotted = [configuration.row_slot for configuration in cases.CONFIGURATIONS]
        assert len(slotted) / 2 - 2 <= sum(slotted) <= len(slotted) / 2 + 2
        for argument in ("counts", "stats", "page_size", "cache_slots", "pdl", "offsets", "slices", "noise"):
            assert any(getattr(configuration, argument) for configuration in cases.CONFIGURATIONS), argument
        assert not all(configuration.aligned for configuration in cases.CONFIGURATIONS)
        without = {family(configuration) for configuration in DECODE if not configuration.indices}
        assert without == {"small_row", "resident", "streaming"}
        cached = {family(c) for c in cases.CONFIGURATIONS if c.cache_slots}
        assert cached >= {*without, "paper_gvr", "prefill"}


class TestContents:
    def test_what_is_not_given_is_not_rewritten(self) -> None:
        plain = replace(TINY, indices=False, row_slot=False)
        rewritten = {name for name in cases.REWRITINGS if cases.can_rewrite(plain, name)}
        assert rewritten == {"state", "seq_lens", "logits", cases.STALE_STATES}
        rewritten = {name for name in cases.REWRITINGS if cases.can_rewrite(PREFILL, name)}
        assert rewritten == {"row_slot", "seq_lens", "logits", cases.SCALED_LOGITS}
        assert {name for name in cases.REWRITINGS if cases.can_rewrite(SLICES, name)} == rewritten | {"carry"}
        rewritten = {name for name in cases.REWRITINGS if cases.can_rewrite(SAMPLE, name)}
        assert rewritten == {"row_slot", "logits", "parameters", cases.SCALED_LOGITS}
        assert not cases.can_rewrite(replace(SAMPLE, row_slot=False), "row_slot")
        rewritten = {name for name in cases.REWRITINGS if cases.can_rewrite(TOPK, name)}
        assert rewritten == {"logits", cases.SCALED_LOGITS}


OPS = {
    "decode": (stress_workload, "indexer_topk_decode"),
    "prefill": (stress_workload.gvr_topk, "indexer_topk_prefill"),
    "sample": (sampling, "sample"),
    "topk": (stress_workload.ops, "launch"),
}
"""Where a workload finds the function of each op."""


def sabotage(monkeypatch: pytest.MonkeyPatch, change: Any, op: str = "decode") -> None:
    """Let the op change something after it has run: ``change(call number, its arguments)``."""
    place, calls = OPS[op], itertools.count()
    real = getattr(*place)

    def changing(*positional: Any, **named: Any) -> None:
        real(*positional, **named)
        change(next(calls), positional[0]._asdict() if op == "topk" else named)

    monkeypatch.setattr(*place, changing)


class TestWorkload:
    @pytest.mark.parametrize(
        "configuration",
        [
            TINY,
            PLAIN,
            FULL,
            replace(TINY, requests=5, page_size=0),
            replace(TINY, indices=False),
            PREFILL,
            SLICES,
            replace(PREFILL, offsets=False, cache_slots=False),
            replace(PREFILL, offsets=False, cache_slots=False, page_size=0, row_slot=False),
        ],
    )
    def test_the_op_passes(self, configuration: cases.Configuration) -> None:
        workload = Workload(configuration, "cpu", launches=6)
        for _ in range(3):
            workload.replay()
        counts = workload.counts()
        assert counts.clean and counts.launches == 18 and counts.first_wrong == ""

    @pytest.mark.parametrize(
        ("configuration", "output"),
        [
            *((SAMPLE, output) for output in ("out", "logprobs", "limits", "kept", "counts")),
            (NOISE, "out"),
            *((TOPK, output) for output in ("values", "indices")),
            *((PREFILL, output) for output in ("out", "slots", "counts")),
            *((FULL, output) for output in ("out", "slots", "counts")),
        ],
    )
    def test_wrong_outputs_are_their_launch_s(
        self, configuration: cases.Configuration, output: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        workload = Workload(configuration, "cpu", launches=4)
        workload.replay()
        assert workload.counts().clean

        def change(call: int, named: dict[str, Any]) -> None:
            if call == 3:
                named[output][-1:] -= 1

        sabotage(monkeypatch, change, configuration.op)
        workload.replay()
        counts = workload.counts()
        assert (counts.launches, counts.wrong_launches, counts.guard_words) == (8, 1, 0)
        name = "result" if output == next(iter(configuration.written)) else output
        assert counts.first_wrong.startswith(f"{name} of launch 3 row ")

    def test_words_behind_a_row_are_counted_and_put_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        workload = Workload(TINY, "cpu", launches=4)

        def change(call: int, named: dict[str, Any]) -> None:
            if call == 1:
                out = named["out"]
                torch.as_strided(out, (3,), (1,), out.storage_offset() + TINY.k)[:] = 5
                words = named["state"].words
                torch.as_strided(words, (1,), (1,), words.storage_offset() + words.numel())[:] = 5

        sabotage(monkeypatch, change)
        for _ in range(3):
            workload.replay()
        counts = workload.counts()
        assert (counts.guard_words, counts.wrong_launches, counts.wrong_hints) == (4, 0, 0)
        assert not counts.clean

    @pytest.mark.parametrize(
        ("configuration", "tensor"),
        [
            *((TINY, tensor) for tensor in cases.REWRITINGS if tensor not in ("carry", "parameters")),
            (SLICES, "carry"),
            *((PREFILL, tensor) for tensor in ("row_slot", "seq_lens", "logits", cases.SCALED_LOGITS)),
            *((SAMPLE, tensor) for tensor in ("row_slot", "logits", "parameters", cases.SCALED_LOGITS)),
        ],
    )
    def test_rewritten_tensors_are_restored(self, configuration: cases.Configuration, tensor: str) -> None:
        workload = Workload(replace(configuration, chains=1), "cpu", launches=4, rewritable=True)
        target = workload.tensor(cases.rewritten_tensor(tensor))
        before = target.clone()
        pool = cases.rewrite_pool(tensor, workload.configuration, target.shape, Draw("cpu", 1))
        rewriter = make_rewriter(target, pool)
        rewriter.feed()
        assert not torch.equal(target, before)
        workload.replay()
        disturbed = workload.counts()
        assert disturbed.guard_words == 0
        assert disturbed.wrong_launches > 0 or cases.rewritten_tensor(tensor) not in ("seq_lens", "logits")
        assert disturbed.wrong_launches == 0 or cases.rewritten_tensor(tensor) not in cases.GUESSES
        workload.restore()
        workload.replay()
        assert workload.counts().clean


class TestNeighbours:
    def test_a_device_that_does_not_answer_is_noticed(self) -> None:
        class Never:
            def query(self) -> bool:
                return False

        fed: list[int] = []
        with pytest.raises(Hang, match=r"within 0\.05 s"):
            wait_for(Never(), lambda: fed.append(1), seconds=0.05)  # type: ignore[arg-type]
        assert fed


class TestCompiledHelpers:
    """What C++ and Python both say."""

    def test_modes_of_a_chaos_build(self) -> None:
        text = (STRESS / "chaos_modes.h").read_text()
        modes = dict(re.findall(r"^  k(\w+) = (\d+),", text, re.MULTILINE))
        assert [int(number) for number in modes.values()] == list(range(len(CHAOS_MODES) + 1))
        assert int(modes["Modes"]) == len(CHAOS_MODES)

    def test_numbers_of_the_comparing_kernel(self) -> None:
        text = (STRESS / "neighbours.cu").read_text()
        assert f"kGuard = {GUARD};" in text and f"kPoison = {POISON};" in text
        (counters,) = re.findall(r"enum Counter : int \{\n(.*?)  kCounters,", text, re.DOTALL)
        assert len(re.findall(r"^  k\w+", counters, re.MULTILINE)) == len(stress_workload._COUNTERS)

    def test_this_library_is_no_chaos_build(self) -> None:
        assert chaos_modes() == 0
        with pytest.raises(StressError, match="mode: wanted one of the 0 modes"):
            set_chaos(1)

    def test_every_wrapper_that_waits_or_reaches_another_cta_is_a_place_for_delays(self) -> None:
        waits = re.compile(
            r"barrier\.cluster|mbarrier\.|st\.async|ld\.shared::cluster|cp\.async\.wait|griddep"
        )
        for name in ("barrier", "memory"):
            text = (ROOT / "cpp" / "kernels" / "ptx" / f"{name}.cuh").read_text()
            functions = re.split(r"\n(?=(?:template|GVR_DEVICE))", text)
            without = [f for f in functions if waits.search(f) and "GVR_CHAOS_POINT();" not in f]
            assert without == []


def command(*arguments: str) -> Ended:
    return run_verb("stress", "--device", "cpu", *arguments)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CONFIGURATIONS", (TINY, PLAIN))
    ones = [replace(TINY, name="one", chains=1, row_slot=False), replace(TINY, name="other", chains=1)]
    monkeypatch.setattr(cases, "rewritten_configurations", lambda: ones)


@pytest.mark.usefixtures("tiny")
class TestCommand:
    def test_clean_run(self, tmp_path: Path) -> None:
        out = tmp_path / "stress.json"
        done = command("--launches", "20", "--out", str(out), "--commit", "abc")
        assert done.exit_code == 0, done.output
        data = json.loads(out.read_text())
        assert data["format"] == stress_run.FORMAT and data["mode"] == "launches"
        assert data["machine"]["commit"] == "abc"
        assert [result["configuration"]["name"] for result in data["results"]] == ["tiny", "plain"]
        assert all(result["launches"] == 24 and result["clean"] for result in data["results"])
        assert data["totals"] == {
            "configurations": 2,
            "launches": 48,
            "error_bound_95": 3 / 48,
            "launches_with_delays": 0,
            "wrong_launches": 0,
            "wrong_hints": 0,
            "guard_words": 0,
            "clean": True,
        }
        assert "48 launches" in done.output

    def test_wrong_launches_end_with_status_1(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sabotage(monkeypatch, lambda call, named: named["out"][0, 0].add_(1))
        out = tmp_path / "stress.json"
        done = command("--launches", "8", "--configurations", "plain", "--out", str(out))
        assert done.exit_code == 1
        assert "plain: none: 8 launches" in done.output and "WRONG 8 wrong launches" in done.output
        (result,) = json.loads(out.read_text())["results"]
        assert result["wrong_launches"] == 8 and "result of launch 0" in result["first_wrong"]

    def test_an_error_is_reported_and_ends_with_status_1(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fail = Mock(side_effect=RuntimeError("an illegal memory access\nand more"))
        monkeypatch.setattr(stress_workload, "indexer_topk_decode", fail)
        out = tmp_path / "stress.json"
        done = command("--launches", "8", "--out", str(out))
        assert done.exit_code == 1
        data = json.loads(out.read_text())
        assert data["failure"] == {"behind_result": 0, "hang": False, "error": "an illegal memory access"}
        assert not data["totals"]["clean"]

    def test_rewriting(self, tmp_path: Path) -> None:
        out = tmp_path / "rewrite.json"
        done = command("--rewrite", "--rewrite-seconds", "0.2", "--out", str(out))
        assert done.exit_code == 0, done.output
        data = json.loads(out.read_text())
        assert data["mode"] == "rewrite"
        ran = [(result["configuration"]["name"], result["rewritten"]) for result in data["results"]]
        absent = (cases.SCALED_LOGITS, "carry", "parameters")
        common = [name for name in cases.REWRITINGS if name not in absent]
        assert ran == [
            *(("one", name) for name in common if name != "row_slot"),
            *(("other", name) for name in common),
        ]
        for result in data["results"]:
            assert result["exact_after"] and result["guard_words"] == 0 and result["launches"] > 0

    def test_guard_words_count_while_results_may_be_anything(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def change(call: int, named: dict[str, Any]) -> None:
            if call == 0:
                out = named["out"]
                torch.as_strided(out, (1,), (1,), out.storage_offset() + TINY.k)[:] = 5

        out = tmp_path / "rewrite.json"
        sabotage(monkeypatch, change)
        done = command("--rewrite", "--rewrite-seconds", "0.1", "--tensors", "indices", "--out", str(out))
        assert done.exit_code == 1
        assert json.loads(out.read_text())["totals"]["guard_words"] == 1

    def test_a_device_that_hangs_ends_the_process_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hang = Mock(side_effect=Hang("the device did not finish within 60 s"))
        monkeypatch.setattr(stress_run, "replay_beside", hang)
        monkeypatch.setattr(stress.os, "_exit", sys.exit)
        out = tmp_path / "stress.json"
        assert command("--out", str(out)).exit_code == 1
        assert json.loads(out.read_text())["failure"]["hang"]


def test_launches_within_an_interval_are_counted() -> None:
    # Two sequences of launches; what lies between the end of one and the begin of the other is none.
    stamps = [(0, 1), (10, 0), (20, 0), (100, 1), (110, 0), (120, 0)]
    count = lambda *intervals: launches_within(  # noqa: E731
        torch.tensor(stamps), torch.tensor(intervals, dtype=torch.int64).view(-1, 2)
    )
    assert count() == (4, 0)
    assert count((0, 20)) == (4, 2)
    assert count((1, 19)) == (4, 0)
    assert count((-5, 10), (15, 200)) == (4, 3)
