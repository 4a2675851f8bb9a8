"""The kernel benchmark's logic that needs no GPU: cells, answers compared, ratios and targets, files."""

from __future__ import annotations

import io
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from eval import baselines, bench_kernels, fuzz, guess_table, phase_timing, plot_bench, tune
from eval.common import fuzz_cases
from eval.common.bench_cases import BATCHES, LENGTHS, Cell, all_cells, step_pairs
from eval.common.bench_report import TARGETS, Index, checks, worst_ratios
from eval.common.machine import describe_machine, write_json
from eval.kernel_timing import Rows
from gvr_topk.contract import exact_topk
from gvr_topk.synthetic import LayerGenerator


def result(
    cell: Cell, impl: str, cold: float | None, exact: bool | None = True, **more: Any
) -> dict[str, Any]:
    return {"cell": cell.as_json(), "impl": impl, "cold_us": cold, "warm_us": None, "exact": exact, **more}


class TestCells:
    def test_keys_are_unique(self) -> None:
        keys = [cell.key for cell in all_cells()]
        assert len(keys) == len(set(keys))

    def test_main_sweep_covers_every_length_and_batch(self) -> None:
        main = {(cell.n, cell.batch) for cell in all_cells() if cell.group == "main"}
        assert main == {(n, batch) for n in LENGTHS for batch in BATCHES}
        assert set(TARGETS) <= main

    def test_traces_add_a_cell_each(self) -> None:
        source = LayerGenerator(20, 4000, 6)
        cells = [cell for cell in all_cells([source]) if cell.group == "trace"]
        assert [(cell.n, cell.rows) for cell in cells] == [(4000, "trace:synthetic-L20")]

    def test_step_pairs_are_consecutive(self) -> None:
        source = LayerGenerator(20, 500, 40)
        pairs = step_pairs(source)
        assert len(pairs) == 12
        assert all(len(late) == len(early) + 1 for early, late in pairs)
        assert np.array_equal(pairs[1][0], source.scores(3))

    def test_selection_by_group_and_key(self) -> None:
        cells = all_cells()
        assert {cell.group for cell in bench_kernels.select(cells, "hint,k", "")} == {"hint", "k"}
        picked = bench_kernels.select(cells, "main", "n70690 b1 ")
        assert [(cell.n, cell.batch) for cell in picked] == [(70690, 1)]
        with pytest.raises(typer.BadParameter, match="nothing"):
            bench_kernels.select(cells, "nothing", "")

    def test_our_kernels_refuse_what_cannot_be_planned(self) -> None:
        cell = Cell("main", 524288)
        assert "262144" in bench_kernels.ours("gvr_mean").refuse(cell)
        assert bench_kernels.ours("cluster").refuse(cell) == ""


class TestRows:
    def test_shifted_steps_follow_each_other_both_ways(self) -> None:
        rows = Rows(torch.zeros(4, 1, 8), torch.tensor([8]), 2, shift=3)
        assert [rows.offset_of(i) for i in range(4)] == [-3, -3, 3, 3]

    def test_few_keeps_pairs_together(self) -> None:
        logits = torch.arange(8.0)[:, None, None].expand(8, 1, 4)
        lengths = torch.arange(8, dtype=torch.int32)[:, None]
        few = Rows(logits, lengths, 2).few(4)
        assert few.logits[:, 0, 0].tolist() == [0, 1, 4, 5]
        assert few.lengths_of(2).tolist() == [4]


class TestSameValues:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, 3.0], [0.0, -0.0, 5.0, -1.0, 0.0]])
    want = torch.tensor([[0, 2, 3], [0, 1, 2]])

    def verdict(self, *rows: list[int]) -> bool:
        return bench_kernels.same_values(torch.tensor(rows), self.want, self.logits)

    def test_other_ties_in_any_order_are_the_same_values(self) -> None:
        assert not self.verdict([4, 3, 1], [2, 4, 0])
        assert not self.verdict([4, 3, 0], [2, 3, 0])
        # Three 3s but only the two of the oracle's top-3 and the 2 beside them.
        assert self.verdict([4, 3, 0], [2, 4, 0])
        assert self.verdict([2, 3, 0], [1, 2, 4])

    @pytest.mark.parametrize("row", [[0, 0, 2], [0, 2, 5], [0, 2, -1], [0, 2, -7]])
    def test_repeated_missing_or_outside_positions_are_not(self, row: list[int]) -> None:
        assert not self.verdict(row, [0, 1, 2])

    def test_short_rows_agree_on_padding(self) -> None:
        want = exact_topk(self.logits, torch.tensor([2, 5]), 3)
        assert bench_kernels.same_values(torch.tensor([[1, -1, 0], [2, 0, 1]]), want, self.logits)


class TestReport:
    main = Cell("main", 70690)
    hint = Cell("hint", 70690, hint="none")

    def index(self) -> Index:
        return Index(
            [
                result(self.main, "cluster", 4.0),
                result(self.main, "trtllm", 20.0),
                result(self.main, "vllm", 2.0, exact=False),
                result(self.hint, "cluster", 5.0),
                result(self.hint, "trtllm", 10.0),
                result(self.hint, "torch", None, exact=None, note="refused"),
            ]
        )

    def test_worst_ratio_is_over_all_cells_and_right_answers(self) -> None:
        rows = worst_ratios(self.index())
        assert [(row["other"], row["which"]) for row in rows] == [("trtllm", "cold")]
        assert rows[0]["ratio"] == 2.0
        assert rows[0]["cell"] == self.hint.key
        assert rows[0]["cells"] == 2
        assert rows[0]["geometric_mean"] == pytest.approx(10**0.5)

    def test_checks_say_met_missed_and_not_measured(self) -> None:
        found = {check["what"]: check for check in checks(self.index())}
        reached = found["cluster: us at N = 70,690, batch 1"]
        assert (reached["wanted"], reached["reached"], reached["met"]) == (5.0, 4.0, True)
        assert found["cluster: us at N = 8,192, batch 1"]["met"] is None
        spread = found["cluster: hints of every quality and none, slowest over fastest"]
        assert (spread["reached"], spread["met"], spread["where"]) == (1.25, True, self.hint.key)

    def test_inexact_kernel_of_ours_reaches_nothing(self) -> None:
        found = checks(Index([result(self.main, "cluster", 1.0, exact=False)]))
        assert all(check["reached"] is None for check in found)

    def test_radix_is_held_to_trtllm_at_batches_1_8_64(self) -> None:
        results = []
        for batch, time in ((1, 10.0), (8, 12.0), (128, 1.0)):
            cell = Cell("main", 4096, batch)
            results += [result(cell, "radix", 10.0), result(cell, "trtllm", time)]
        found = {check["what"]: check for check in checks(Index(results))}
        check = found["radix: speedup over trtllm, every N, batch 1, 8, 64"]
        assert (check["reached"], check["met"]) == (1.0, True)

    def test_failed_results_are_measured_again(self) -> None:
        assert bench_kernels._failed(result(self.main, "cluster", 4.0, exact=False))
        assert bench_kernels._failed(result(self.main, "trtllm", None, exact=False))
        assert not bench_kernels._failed(result(self.main, "trtllm", 4.0, exact=False))
        assert not bench_kernels._failed(result(self.main, "trtllm", None, exact=None))


class TestFiles:
    def data(self) -> dict[str, Any]:
        results = []
        for n in (4096, 70690):
            for which in ("cluster", "trtllm", "read_floor"):
                results.append(result(Cell("main", n), which, 1.0 + n / 1e4))
                results[-1]["warm_us"] = 2.0
        machine = {"device": "a GPU", "torch": "2", "commit": "abc"}
        runs = [{"machine": machine, "baselines": {}, "sets_in_20_runs": {}}]
        return {"format": bench_kernels.FORMAT, "method": "", "runs": runs, "results": results}

    def test_load_refuses_another_format(self, tmp_path: Path) -> None:
        path = tmp_path / "other.json"
        path.write_text('{"format": "x"}')
        with pytest.raises(typer.BadParameter, match=r"other\.json"):
            bench_kernels.load(path)

    def test_written_file_carries_ratios_and_checks(self, tmp_path: Path) -> None:
        path = tmp_path / "bench.json"
        bench_kernels._finish(self.data(), path)
        written = bench_kernels.load(path)
        assert written["worst_ratios"][0]["other"] == "trtllm"
        assert len(written["checks"]) >= len(TARGETS)
        assert list(tmp_path.iterdir()) == [path]

    def test_write_json_is_strict(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="JSON"):
            write_json(tmp_path / "x.json", {"a": float("nan")})

    def test_plot_draws_every_implementation(self, tmp_path: Path) -> None:
        plot_bench.draw(self.data(), tmp_path / "bench.svg", (1,))
        text = (tmp_path / "bench.svg").read_text()
        assert all(f"<!-- {label} -->" in text for label in ("cluster", "trtllm", "read only (floor)"))

    def test_plot_names_a_batch_without_results(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="batch"):
            plot_bench.draw(self.data(), tmp_path / "bench.png", (64,))

    def test_machine_is_described_without_a_gpu(self) -> None:
        described = describe_machine("abc")
        assert described["commit"] == "abc"
        assert described["torch"] == torch.__version__
        json.dumps(described, allow_nan=False)


class TestBaselines:
    def test_missing_files_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        found = baselines.available(tmp_path)
        assert set(found) == {"torch", "trtllm", "vllm", "vllm_per_row", "flashinfer"}
        assert not found["torch"].why_not
        assert "libtrtllm_kernel.so" in found["trtllm"].why_not
        assert "_C_stable_libtorch.abi3.so" in found["vllm"].why_not

    def test_library_that_is_none_says_what_the_loader_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        (tmp_path / "libtrtllm_kernel.so").write_bytes(b"no library")
        assert "libtrtllm_kernel.so" in baselines.available(tmp_path)["trtllm"].why_not

    def test_compressed_file_is_unpacked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        (tmp_path / "in" / "deep").mkdir(parents=True)
        (tmp_path / "in" / "deep" / "some.so.xz").write_bytes(lzma.compress(b"content"))
        found = baselines.find_file(tmp_path / "in", "some.so")
        assert found.read_bytes() == b"content"
        assert (tmp_path / "in") not in found.parents

    def test_rows_for_operators_without_lengths_hide_what_lies_past_the_end(self) -> None:
        logits = torch.full((2, 1, 4), float("nan"))
        logits[:, :, :3] = 1.0
        hidden = baselines._full_rows(Rows(logits, torch.tensor([3], dtype=torch.int32), 2))
        assert hidden[0, 0].tolist() == [1.0, 1.0, 1.0, float("-inf")]


class TestFuzz:
    def test_cpu_op_passes_some_seconds(self) -> None:
        summary = fuzz.run("cpu", 4.0, seed=7)
        assert summary["failure"] is None
        assert summary["cases"] > 100
        assert set(summary["paths_asked_for"]) == set(fuzz_cases.PATHS)

    def test_cases_reach_every_kind(self) -> None:
        cases = [fuzz_cases.draw_case(3, index, elements=1 << 22) for index in range(400)]
        assert {kind for case in cases for kind in case.contents} == set(fuzz_cases.CONTENTS)
        assert {kind for case in cases for kind in case.hints} == set(fuzz_cases.HINTS)
        assert {kind for case in cases for kind in case.lengths} == set(fuzz_cases.LENGTHS)
        assert {case.slots for case in cases} == {"own", "shuffled", "any"}
        assert {case.ctas_per_row for case in cases} == {0, 1, 2, 4, 8, 16}
        assert any(case.width > 1 << 20 for case in cases)
        assert any(case.rows > 64 for case in cases)
        assert all(case.rows * case.width <= 1 << 22 for case in cases)
        assert all(case.k in fuzz_cases.TUNED_K for case in cases if case.path == "gvr")

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
            assert torch.equal(fuzz.sorted_topk(problem.logits, problem.visible, case.k), problem.want), case

    @pytest.mark.parametrize("broken", ["one index", "column k", "prior", "second call", "raises"])
    def test_a_broken_op_is_found_and_named(self, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = fuzz.indexer_topk_decode, [0]

        def op(logits: torch.Tensor, seq_lens: torch.Tensor, k: int, **arguments: Any) -> torch.Tensor:
            calls[0] += 1
            out = real(logits, seq_lens, k, **arguments)
            if broken == "one index":
                out[-1, k - 1] += 1
            elif broken == "column k":
                out[0, k] = 0
            elif broken == "prior" and arguments["prior"] is not None:
                arguments["prior"][-1, 0] += 1
            elif broken == "second call" and calls[0] % 2 == 0:
                out[0, 0] += 1
            elif broken == "raises":
                raise RuntimeError("launch failed")
            return out

        monkeypatch.setattr(fuzz, "indexer_topk_decode", op)
        summary = fuzz.run("cpu", 5.0, seed=2)
        expected = {"one index": "first call: result", "raises": "launch failed"}.get(broken, broken)
        assert expected in summary["failure"]["error"]
        assert summary["cases"] == summary["failure"]["case"]["index"]

    def test_command_names_the_case_and_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(fuzz, "indexer_topk_decode", lambda *a, **kw: None)
        app = typer.Typer()
        app.command()(fuzz.main)
        out = tmp_path / "fuzz.json"
        arguments = ["--device", "cpu", "--seed", "4", "--only", "3", "--out", str(out)]
        ended = CliRunner().invoke(app, arguments)
        assert ended.exit_code == 1
        assert "eval/fuzz.py --device cpu --seed 4 --only 3" in ended.output
        assert json.loads(out.read_text())["failure"]["case"]["index"] == 3


class TestPhaseTiming:
    phases = ("a", "b")

    def test_plain_launches_give_medians_and_others_a_total(self) -> None:
        clocks = np.zeros((4, phase_timing.PHASE_STAMPS), dtype=np.int64)
        clocks[0, :3] = (100, 110, 140)
        clocks[1, :3] = (500, 512, 532)
        clocks[2, :3] = (50, 64, 74)
        clocks[3, :5] = (1000, 1010, 1020, 1030, 1400)
        figures = phase_timing.phase_cycles(clocks, self.phases)
        assert figures["cycles"] == {"a": 12, "b": 20}
        assert (figures["total"], figures["plain"], figures["launches"]) == (32, 3, 4)
        assert figures["other_total"] == 400

    def test_library_without_stamps_is_named(self) -> None:
        with pytest.raises(phase_timing.NoStampsError, match="GVR_PHASE_TIMING"):
            phase_timing.phase_cycles(np.zeros((3, 8), dtype=np.int64), self.phases)

    def test_every_phase_fits_the_stamps_and_the_paper(self) -> None:
        assert all(len(phases) < phase_timing.PHASE_STAMPS for phases in phase_timing.PHASES.values())
        assert {len(figures) for figures in phase_timing.PAPER.values()} == {len(phase_timing.PHASES["gvr"])}


class TestTune:
    shapes = (
        {"n": 4096, "batch": 1, "dtype": "fp32", "planned": 2, "us": {"1": 4.0, "2": 3.0}},
        {"n": 4096, "batch": 8, "dtype": "fp32", "planned": 1, "us": {"1": 6.0, "2": 4.0}},
        {"n": 8192, "batch": 8, "dtype": "bf16", "planned": 1, "us": {"1": 6.0}},
    )

    def test_table_shows_best_and_what_the_plan_costs(self) -> None:
        console = Console(width=120, file=io.StringIO())
        console.print(tune.policy_table(self.shapes, "fp32"))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "2: 3.0" in text
        assert "2: 4.0 (1, 1.50)" in text
        assert "8,192" not in text

    def test_offered_sizes_hold_the_row(self) -> None:
        sizes, planned = tune.offered(1, 1 << 21, torch.float32, 132)
        assert planned in sizes
        assert 1 not in sizes


class TestGuessTable:
    def test_quantile_needs_fewer_passes_where_hints_hit(self) -> None:
        source = LayerGenerator(60, 20000, 6, correlation=0.97)
        mean, quantile = (
            guess_table.summarize(guess_table.replay(source, 512, guess, 0, 6, "cpu"), 512)
            for guess in guess_table.GUESSES
        )
        assert mean["steps"] == quantile["steps"] == 5
        assert mean["hit_ratio"] == quantile["hit_ratio"] > 0.5
        assert quantile["mean_passes"] <= mean["mean_passes"]
        assert quantile["as_reference"] is None

    def test_summary_takes_the_kernel_and_counts_agreement(self) -> None:
        steps = [guess_table.StepPasses(1, 1, 50), guess_table.StepPasses(4, 2, 100)]
        figures = guess_table.summarize(steps, 100)
        assert figures["mean_passes"] == 2.5
        assert figures["within"] == [0.5, 0.5, 0.5]
        assert (figures["max_passes"], figures["as_reference"], figures["hit_ratio"]) == (4, 0.5, 0.75)

    def test_command_writes_json_and_markdown(self, tmp_path: Path) -> None:
        app = typer.Typer()
        app.command()(guess_table.main)
        out = tmp_path / "guess.json"
        arguments = ["--device", "cpu", "--layers", "20", "--generated", "2", "--out", str(out)]
        ended = CliRunner().invoke(app, arguments)
        assert ended.exit_code == 0, ended.output
        rows = json.loads(out.read_text())["rows"]
        assert [(row["guess"], row["offset"]) for row in rows] == [
            ("mean", 0),
            ("mean", 1),
            ("quantile", 0),
            ("quantile", 1),
        ]
        assert out.with_suffix(".md").read_text().count("synthetic-L20") == 4
