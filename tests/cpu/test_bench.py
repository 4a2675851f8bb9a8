"""The kernel benchmark on the CPU: every answer compared, figures and files."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bench_data import CAUSAL
from bench_data import short_chains as short_chains  # a fixture for all

from eval.__main__ import main
from eval.bench import baselines, bench, oracles, our_kernels
from eval.bench.bench_cases import Cell, Sources
from eval.bench.bench_report import FORMAT, Index
from eval.bench.kernel_timing import Chain, Implementation, Prepared
from eval.bench.our_kernels import IMPLEMENTATIONS
from eval.common.options import read_results
from gvr_topk.arguments import BlocksArguments, DecodeArguments, InBlocksArguments, PrefillArguments
from gvr_topk.contract import exact_topk

BLOCK_OPS: dict[str, type[Any]] = {"blocks": BlocksArguments, "in_blocks": InBlocksArguments}


class TestCellRun:
    cell = Cell("scale", 300, 2, k=16, rows="scale")

    def run(self) -> bench.CellRun:
        return bench.CellRun(self.cell, Sources(), "cpu", each_launches=8)

    @pytest.mark.parametrize("name", ["hinted", "no_hint"])
    def test_exact_op_is_timed_as_a_whole_and_by_launch(self, name: str) -> None:
        measured = self.run().measure(IMPLEMENTATIONS[name])
        assert measured["exact"] is True
        assert measured["cold_us"] > 0
        assert measured["worst_us"] >= measured["cold_us"]
        assert {"guess_hit", "passes", "each_us"} <= set(measured)
        json.dumps(measured, allow_nan=False)

    @pytest.mark.parametrize("broken", ["first", "middle", "last", "one replay", "not written", "carried"])
    def test_one_wrong_launch_among_all_is_noticed(
        self, broken: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.run()
        timed, launched = run.chain.timed, [0]
        real = our_kernels.launch_op

        def op(arguments: DecodeArguments) -> None:
            launched[0] += 1
            address = arguments.logits.data_ptr()
            step = next(at for at in range(run.chain.count) if address == run.chain.logits[at].data_ptr())
            out, indices = arguments.out, arguments.indices
            kept = out.clone()
            real(arguments)
            replay = (launched[0] - 1 - run.chain.lead) // len(timed)
            spoiled = {"first": timed[0], "middle": timed[3], "one replay": timed[2]}.get(broken, timed[-1])
            if step != spoiled or (broken == "one replay" and replay != 1):
                return
            if broken == "carried":
                indices[indices[:, 0] >= 0] = 0
            elif broken == "not written":
                out.copy_(kept)
            else:
                out[1, 3] = out[1, 2]

        monkeypatch.setattr(our_kernels, "launch_op", op)
        monkeypatch.setattr(bench, "EACH_GROUPS", ())
        monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)
        carrying = our_kernels.Variant(indices=broken == "carried")
        prepare = functools.partial(our_kernels.prepare_ours, variant=carrying)
        measured = run.measure(Implementation("hinted", prepare))
        assert measured["exact"] is False
        assert "wrong rows in 9 replays" in measured["note"]

    @pytest.mark.parametrize("broken", [False, True])
    def test_other_implementations_are_compared_by_value_at_every_step(self, broken: bool) -> None:
        run = self.run()

        def prepare(chain: Chain) -> Prepared:
            prepared = baselines._torch(chain)

            def launch(step: int) -> None:
                prepared.launch(step)
                if broken and step == chain.timed[4]:
                    prepared.results[step, 0, 0] = prepared.results[step, 0, 1]

            return Prepared(launch, prepared.results)

        measured = run.measure(Implementation("torch", prepare))
        assert measured["exact"] is not broken

    def test_error_is_a_result(self) -> None:
        prepare = Mock(side_effect=RuntimeError("out of memory\nmore"))
        measured = self.run().measure(Implementation("torch", prepare))
        assert (measured["cold_us"], measured["exact"]) == (None, False)
        assert measured["note"] == "RuntimeError: out of memory"


class TestTwoLevelIndexer:
    CELL = Cell("v41", 16_400, 2, k=16, rows="blocks")
    IMPLEMENTATIONS = ("blocks", "in_blocks", "torch_blocks", "torch_in_blocks")

    def measure(self, name: str) -> dict[str, Any]:
        run = bench.CellRun(self.CELL, Sources(), device="cpu")
        if name in bench.OURS:
            return run.measure(IMPLEMENTATIONS[name])
        return run.measure(baselines.available()[name])

    @pytest.mark.parametrize("name", IMPLEMENTATIONS)
    def test_every_implementation_is_exact(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)
        measured = self.measure(name)
        assert measured["exact"] is True and measured["cold_us"] > 0 and "note" not in measured

    @pytest.mark.parametrize(("op", "name"), [("blocks", "out"), ("blocks", "blocks"), ("in_blocks", "out")])
    def test_one_wrong_item_is_noticed(self, op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = our_kernels.launch_op, itertools.count()

        def launch(arguments: Any) -> None:
            real(arguments)
            if isinstance(arguments, BLOCK_OPS[op]) and next(calls) == 9:
                getattr(arguments, name)[1, 3] += 1

        monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)
        monkeypatch.setattr(our_kernels, "launch_op", launch)
        measured = self.measure(op)
        assert measured["exact"] is False and measured["note"] == "1 wrong rows in 9 replays"


class TestPrefillRun:
    def run(self, cell: Cell = CAUSAL) -> bench.CellRun:
        return bench.CellRun(cell, Sources(), "cpu")

    @pytest.mark.parametrize(
        ("name", "calls"), [("prefill", 1), ("prefill_slices", 8), ("prefill_last_slice", 1)]
    )
    def test_every_launch_of_slices_begins_where_it_should(
        self, name: str, calls: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, columns = self.run(), []
        real = our_kernels.launch_op

        def op(arguments: Any) -> None:
            real(arguments)
            columns.append(getattr(arguments, "column", 0))

        monkeypatch.setattr(our_kernels, "launch_op", op)
        assert run.measure(IMPLEMENTATIONS[name])["exact"] is True
        assert len(set(columns[-calls:])) == calls

    @pytest.mark.parametrize("buffer", [0, 7])
    def test_one_wrong_row_in_any_buffer_is_noticed(
        self, buffer: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.run()
        real = our_kernels.launch_op

        def op(arguments: PrefillArguments) -> None:
            real(arguments)
            if arguments.logits.data_ptr() == run.chain.logits[buffer].data_ptr():
                arguments.out[150, 3] = arguments.out[150, 2]

        monkeypatch.setattr(our_kernels, "launch_op", op)
        monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)
        measured = run.measure(IMPLEMENTATIONS["prefill"])
        assert measured["exact"] is False
        assert measured["note"] == "9 wrong rows in 9 replays"

    def test_positions_behind_a_row_count_as_none_of_those_alone_that_know_no_lengths(self) -> None:
        run = self.run(dataclasses.replace(CAUSAL, n=200))
        for name, exact in (("torch", True), ("vllm_prefill", False)):
            measured = run.measure(Implementation(name, baselines._torch))
            assert measured["exact"] is exact


class TestSameValues:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, 3.0], [0.0, -0.0, 5.0, -1.0, 0.0]])
    want = torch.tensor([[0, 2, 3], [0, 1, 2]])

    def verdict(self, *rows: list[int]) -> bool:
        return oracles.same_values(torch.tensor(rows), self.want, self.logits)

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
        assert oracles.same_values(torch.tensor([[1, -1, 0], [2, 0, 1]]), want, self.logits)


@pytest.mark.parametrize(
    ("impl", "cold_us", "exact", "failed"),
    [
        ("hinted", 4.0, False, True),
        ("trtllm", None, False, True),
        ("trtllm", 4.0, False, False),
        ("trtllm", None, None, False),
    ],
)
def test_failed_results_are_measured_again(
    impl: str, cold_us: float | None, exact: bool | None, failed: bool
) -> None:
    assert bench._failed({"impl": impl, "cold_us": cold_us, "exact": exact}) is failed


class TestCommand:
    @pytest.fixture(autouse=True)
    def on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sets = bench.repeatability
        monkeypatch.setattr(bench, "require_gpu", lambda: None)
        monkeypatch.setattr(bench, "CellRun", functools.partial(bench.CellRun, device="cpu"))
        monkeypatch.setattr(bench, "copy_bytes_per_second", lambda: 1e12)
        monkeypatch.setattr(bench, "repeatability", lambda found: sets(found, "cpu"))
        monkeypatch.setattr(bench, "spend_first_graph", lambda: None)
        monkeypatch.setattr(bench, "BUDGET_SECONDS", 0.0)

    def test_a_run_is_written_and_resumed(self, tmp_path: Path) -> None:
        out = str(tmp_path / "bench.json")
        cells = ["--cells", "n8192 b1 k2048 fp32 gauss keep0(.9)?$"]
        assert main(["bench", "--out", out, "--only", "hinted,torch", *cells]) == 0
        assert main(["bench", "--out", out, "--resume", out, "--only", "hinted,no_hint", *cells]) == 0
        data = read_results(Path(out), FORMAT)
        made = [
            (result["impl"], result["run"], result["exact"])
            for result in data["results"]
            if result["cold_us"]
        ]
        assert made == [("hinted", 0, True), ("torch", 0, True), ("hinted", 0, True)] + 2 * [
            ("no_hint", 1, True)
        ]
        assert [list(run["sets_in_20_runs"].values()) for run in data["runs"]] == [[1, 1], [1, 1]]
        assert [each["impl"] for each in Index(data).results] == ["hinted", "torch", "hinted"]
