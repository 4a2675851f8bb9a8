"""The fuzzer draws every kind of call, and finds and names a broken op."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from eval.fuzz import fuzz, fuzz_blocks, fuzz_cases, fuzz_contents, fuzz_prefill
from gvr_topk.arguments import BlocksArguments, DecodeArguments, InBlocksArguments, PrefillArguments
from gvr_topk.constants import (
    STATE_FLOATS,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    HintReason,
)

BLOCK_OPS: dict[str, type[Any]] = {"blocks": BlocksArguments, "in_blocks": InBlocksArguments}


class TestFuzz:
    def test_cpu_op_passes_some_cases(self) -> None:
        summary = fuzz.run("cpu", 600.0, seed=7, most=120)
        assert summary["failure"] is None
        assert summary["cases"] == 120
        assert set(summary["paths_asked_for"]) == set(fuzz_cases.PATHS)
        assert set(summary["prefill"]["paths_asked_for"]) == set(fuzz_prefill.PATHS)
        assert 0.1 < summary["prefill"]["cases"] / summary["cases"] < 0.5

    def test_cases_reach_every_kind(self) -> None:
        cases = [fuzz_cases.draw_case(3, index, elements=1 << 22) for index in range(400)]
        assert {kind for case in cases for kind in case.contents} == set(fuzz_contents.CONTENTS)
        assert {kind for case in cases for kind in case.hints} == set(fuzz_cases.HINTS)
        assert {kind for case in cases for kind in case.lengths} == set(fuzz_cases.LENGTHS)
        assert {case.slots for case in cases} == {"own", "shuffled", "any"}
        assert {case.ctas_per_row for case in cases} == {0, 1, 2, 4, 8, 16}
        assert any(case.width > 1 << 20 for case in cases)
        assert any(case.rows > 64 for case in cases)
        assert all(case.rows * case.width <= 1 << 22 for case in cases)
        assert all(case.k in fuzz_cases.TUNED_K for case in cases if case.path == "paper_gvr")
        assert {case.state for case in cases} == {fuzz_cases.ABSENT, *fuzz_cases.STATES}
        assert any(case.state != "absent" and not case.hints and case.slots != "own" for case in cases)
        assert {(case.counts, case.stats) for case in cases} == {(a, b) for a in (0, 1) for b in (0, 1)}
        assert any(case.by_row and case.next_n == 3 for case in cases)
        paged = [case for case in cases if case.page_size]
        assert {(case.cache_slots, case.holes) for case in paged} == {(a, b) for a in (0, 1) for b in (0, 1)}
        assert not any(case.cache_slots for case in cases if not case.page_size)

    @pytest.mark.parametrize("kind", fuzz_cases.STATES)
    def test_states_are_what_their_name_says(self, kind: str) -> None:
        kth = torch.linspace(-2.0, 2.0, 300)
        words = fuzz_cases._words(kind, kth, torch.Generator().manual_seed(1))
        assert words.shape == (300, STATE_FLOATS) and words.dtype == torch.float32
        assert words.is_contiguous()
        first, bits = words[:, 0], words[:, 3].view(torch.int32)
        if kind in ("zscore", "either"):
            assert float((first - STATE_ZSCORE_ORIGIN).abs().max()) < 32
            assert float((words[:, 1] - kth).abs().max()) < 0.5
            assert set((bits & 1).tolist()) == ({0} if kind == "zscore" else {0, 1})
        elif kind == "value":
            assert bool((first == STATE_VALUE_ONLY).all()) and set((bits & 1).tolist()) == {1}
        elif kind == "absurd":
            assert 0 < int((first == STATE_VALUE_ONLY).sum()) < 300
        elif kind in ("infinite", "masked"):
            assert bool((first == {"infinite": STATE_INFINITE, "masked": STATE_MASKED}[kind]).all())
        elif kind in ("share", "window"):
            assert bool(((first >= 0) & (first < 1)).all() if kind == "share" else (first < 0).all())
        elif kind == "bits":
            assert bool(words.isnan().any()) and len(bits.unique()) > 290

    def test_kth_value_of_rows(self) -> None:
        logits = torch.tensor([[3.0, 1.0, torch.nan, 2.0], [5.0, 4.0, 0.0, 0.0]])
        wanted = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
        assert fuzz_cases._kth(logits, wanted).tolist() == [3.0, 4.0]

    def test_case_and_tensors_are_made_again_from_two_numbers(self) -> None:
        cases = [fuzz_cases.draw_case(5, 11, elements=1 << 15) for _ in range(2)]
        assert cases[0] == cases[1]
        first, second = (fuzz_cases.make_problem(case, "cpu") for case in cases)
        assert torch.equal(first.logits.nan_to_num(), second.logits.nan_to_num())
        assert torch.equal(first.seq_lens, second.seq_lens)

    def test_oracles_agree(self) -> None:
        for index in range(40):
            case = fuzz_cases.draw_case(9, index, elements=1 << 13)
            problem = fuzz_cases.make_problem(case, "cpu")
            assert torch.equal(fuzz.sorted_topk(problem.logits, problem.visible, case.k), problem.wanted), (
                case
            )

    @pytest.mark.parametrize(
        "broken",
        [
            "one index",
            "column k",
            "slots",
            "counts",
            "indices",
            "words of other slots",
            "unknown reason",
            "second call",
            "raises",
        ],
    )
    def test_a_broken_op_is_found_and_named(self, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = fuzz.launch, [0]

        def op(a: Any) -> None:
            real(a)
            if not isinstance(a, DecodeArguments):
                return
            calls[0] += 1
            if broken == "one index":
                a.out[-1, a.k - 1] += 1
            elif broken == "column k":
                a.out[0, a.k] = 0
            elif broken == "slots" and a.slots is not None:
                a.slots[-1, 0] -= 1
            elif broken == "counts" and a.counts is not None:
                a.counts[0] += 1
            elif broken == "indices" and a.indices is not None:
                a.indices[-1, 0] += 1
            elif broken.startswith("words") and a.state is not None:
                if a.row_slot is not None and int(a.row_slot.max()) < 0:
                    return
                a.state[:, 2] += 1
            elif broken == "unknown reason" and a.stats is not None:
                a.stats[0, 0] = len(HintReason)
            elif broken == "second call" and calls[0] % 2 == 0:
                a.out[0, 0] += 1
            elif broken == "raises":
                raise RuntimeError("launch failed")

        monkeypatch.setattr(fuzz, "launch", op)
        summary = fuzz.run("cpu", 5.0, seed=2)
        expected = {"one index": "first call: result", "raises": "launch failed"}.get(broken, broken)
        assert expected in summary["failure"]["error"]
        assert summary["cases"] == summary["failure"]["case"]["index"]

    def test_command_names_the_case_and_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(fuzz, "launch", lambda arguments: None)
        app = typer.Typer()
        app.command()(fuzz.main)
        out = tmp_path / "fuzz.json"
        arguments = ["--device", "cpu", "--seed", "4", "--only", "3", "--out", str(out)]
        ended = CliRunner().invoke(app, arguments)
        assert ended.exit_code == 1
        assert "python -m eval fuzz --device cpu --seed 4 --only 3" in ended.output
        assert json.loads(out.read_text())["failure"]["case"]["index"] == 3


class TestFuzzPrefill:
    def test_cases_reach_every_kind(self) -> None:
        cases = [fuzz_prefill.draw_prefill_case(3, index, elements=1 << 22) for index in range(400)]
        assert {kind for case in cases for kind in case.contents} == set(fuzz_contents.CONTENTS)
        assert {kind for case in cases for kind in case.windows} == set(fuzz_prefill.WINDOWS)
        assert {case.fresh for case in cases} == set(fuzz_prefill.FRESH)
        assert {case.poison for case in cases} == set(fuzz_prefill.POISONS)
        assert {case.path for case in cases} == set(fuzz_prefill.PATHS)
        assert any(case.width > 1 << 20 for case in cases)
        assert any(case.rows > 600 for case in cases)
        assert all(case.rows * case.width <= 1 << 22 for case in cases)
        assert {(case.counts, case.stats) for case in cases} == {(a, b) for a in (0, 1) for b in (0, 1)}
        tables = {(bool(case.requests), case.offsets, bool(case.page_size)) for case in cases}
        every = {(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)}
        assert tables == every - {(True, False, False)}
        assert all(case.cache_slots for case in cases if case.offsets and case.page_size)
        assert not any(case.cache_slots for case in cases if not case.page_size)

    def test_case_and_tensors_are_made_again_from_two_numbers(self) -> None:
        cases = [fuzz_prefill.draw_prefill_case(5, 12, elements=1 << 15) for _ in range(2)]
        assert cases[0] == cases[1]
        first, second = (fuzz_prefill.make_prefill_problem(case, "cpu") for case in cases)
        assert torch.equal(first.logits.nan_to_num(), second.logits.nan_to_num())
        assert torch.equal(first.row_ends, second.row_ends) and torch.equal(first.out, second.out)

    def test_oracles_agree(self) -> None:
        for index in range(40):
            case = fuzz_prefill.draw_prefill_case(9, index, elements=1 << 13)
            by_key, by_sort = (
                fuzz_prefill.make_prefill_problem(case, "cpu", oracle)
                for oracle in (fuzz.exact_topk, fuzz.sorted_topk)
            )
            assert torch.equal(by_key.out, by_sort.out), case

    @pytest.mark.parametrize("kind", fuzz_prefill.WINDOWS)
    def test_windows_are_what_their_name_says(self, kind: str) -> None:
        case = fuzz_prefill.draw_prefill_case(1, 1, elements=1 << 15)
        case = dataclasses.replace(case, width=500, k=100, rows=50)
        draw = torch.Generator().manual_seed(1)
        starts, ends = fuzz_prefill._windows(kind, 50, case, draw)
        lengths = ends - starts
        holds = {
            "full": (starts == 0) & (ends == 500),
            "causal": (ends == torch.arange(451, 501)) & (starts == starts[0]) & (starts >= 0),
            "random": (starts >= 0) & (lengths >= 0) & (ends <= 500),
            "near_k": (lengths >= 98) & (lengths <= 103),
            "tiny": lengths.abs() < 5,
            "beyond": (starts < 20) & (ends >= 500),
            "inverted": lengths <= 0,
            "any_int32": starts.abs() < 2**31 + 1,
        }
        assert holds[kind].all() and (kind == "full" or len(ends.unique()) > 3)

    @pytest.mark.parametrize(
        "broken", ["one index", "column k", "slots", "counts", "unknown reason", "second call", "raises"]
    )
    def test_a_broken_op_is_found_and_named(self, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = fuzz.launch, [0]

        def op(a: PrefillArguments) -> None:
            calls[0] += 1
            real(a)
            if broken == "one index":
                a.out[-1, a.k - 1] += 1
            elif broken == "column k":
                a.out[0, a.k] = 0
            elif broken == "slots" and a.slots is not None:
                a.slots[-1, 0] -= 1
            elif broken == "counts" and a.counts is not None:
                a.counts[0] += 1
            elif broken == "unknown reason" and a.stats is not None:
                a.stats[0, 0] = len(HintReason)
            elif broken == "second call" and calls[0] % 2 == 0:
                a.out[0, 0] += 1
            elif broken == "raises":
                raise RuntimeError("launch failed")

        monkeypatch.setattr(fuzz, "launch", op)
        summary = fuzz.run("cpu", 5.0, seed=2, prefill=1.0)
        expected = {"one index": "first call: result", "raises": "launch failed"}.get(broken, broken)
        assert expected in summary["failure"]["error"]
        assert summary["failure"]["case"]["op"] == "prefill"
        assert summary["cases"] == summary["failure"]["case"]["index"]

    def test_the_share_of_cases(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Neither share asks for the other op; a path that prefill has not leaves none of its cases."""
        app = typer.Typer()
        app.command()(fuzz.main)
        out = tmp_path / "fuzz.json"
        for options, cases in ((["--prefill", "1"], 1), (["--prefill", "0"], 0), (["--paths", "no_hint"], 0)):
            given = ["--device", "cpu", "--only", "1", "--out", str(out), *options]
            assert CliRunner().invoke(app, given).exit_code == 0
            assert json.loads(out.read_text())["prefill"]["cases"] == cases
        assert CliRunner().invoke(app, ["--device", "cpu", "--prefill", "2"]).exit_code == 2
        monkeypatch.setattr(fuzz, "launch", lambda arguments: None)
        ended = CliRunner().invoke(app, ["--device", "cpu", "--only", "3", "--prefill", "1"])
        assert ended.exit_code == 1 and "--only 3" in ended.output and "--prefill 1.0" in ended.output


class TestFuzzBlocks:
    def test_cases_reach_every_kind(self) -> None:
        cases = [fuzz_blocks.draw_blocks_case(3, index, elements=1 << 22) for index in range(400)]
        assert {kind for case in cases for kind in case.contents} == set(fuzz_contents.CONTENTS)
        assert {kind for case in cases for kind in case.lengths} == set(fuzz_blocks.LENGTHS)
        assert {kind for case in cases for kind in case.given} == set(fuzz_blocks.GIVEN)
        assert {case.poison for case in cases} == set(fuzz_blocks.POISONS)
        assert {(case.k, case.block_k) for case in cases} >= {(512, 2048)}
        assert any(case.width > 1 << 17 for case in cases) and any(case.rows > 64 for case in cases)
        assert all(case.rows * case.width <= 1 << 22 for case in cases)
        assert any(case.by_row and case.next_n == 3 and case.compress_ratio > 1 for case in cases)
        assert {0, 1, 2048} <= {case.given_blocks for case in cases}
        assert any(case.given_k > 8 * case.given_blocks > 0 for case in cases)

    def test_oracles_agree(self) -> None:
        for index in range(40):
            case = fuzz_blocks.draw_blocks_case(9, index, elements=1 << 13)
            by_key, by_sort = (
                fuzz_blocks.make_blocks_problem(case, "cpu", by_sort=by_sort) for by_sort in (False, True)
            )
            assert torch.equal(by_key.logits.nan_to_num(), by_sort.logits.nan_to_num())
            for name in ("seq_lens", "given", "positions", "blocks", "in_given"):
                assert torch.equal(getattr(by_key, name), getattr(by_sort, name)), (name, case)

    @pytest.mark.parametrize(
        ("broken", "op"),
        [
            ("result", "blocks"),
            ("blocks", "blocks"),
            ("result in given blocks", "in_blocks"),
            ("wrote past column", "in_blocks"),
            ("second call", "blocks"),
            ("launch failed", "blocks"),
        ],
    )
    def test_a_broken_op_is_found_and_named(
        self, broken: str, op: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = fuzz.launch, itertools.count(1)

        def launch(a: Any) -> None:
            real(a)
            if not isinstance(a, BLOCK_OPS[op]):
                return
            call = next(calls)
            if broken == "launch failed":
                raise RuntimeError(broken)
            if broken == "wrote past column":
                a.out[0, a.k] = 0
            elif broken != "second call" or call % 2 == 0:
                (a.blocks if broken == "blocks" else a.out)[-1, 0] += 1

        monkeypatch.setattr(fuzz, "launch", launch)
        summary = fuzz.run("cpu", 5.0, seed=2, prefill=0.0, blocks=1.0)
        assert broken in summary["failure"]["error"]
        assert summary["failure"]["case"]["op"] == "blocks" and summary["blocks"]["cases"] == 0

    def test_the_share_of_cases(self, tmp_path: Path) -> None:
        app = typer.Typer()
        app.command()(fuzz.main)
        out = tmp_path / "fuzz.json"
        for options, cases in ((["1"], 1), (["0"], 0), (["1", "--paths", "no_hint"], 0)):
            given = [
                "--device",
                "cpu",
                "--only",
                "1",
                "--prefill",
                "0",
                "--out",
                str(out),
                "--blocks",
                *options,
            ]
            assert CliRunner().invoke(app, given).exit_code == 0
            assert json.loads(out.read_text())["blocks"]["cases"] == cases
        assert CliRunner().invoke(app, ["--device", "cpu", "--blocks", "-1"]).exit_code == 2
