"""The kernel benchmark's logic that needs no GPU: cells, answers compared, ratios and targets, files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import lzma
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from eval.bench import (
    baselines,
    bench_blocks,
    bench_cases,
    bench_kernels,
    kernel_timing,
    our_kernels,
    peers,
    phase_timing,
    picture,
    plot_bench,
    tune,
)
from eval.bench.bench_cases import (
    BATCHES,
    GROUPS,
    LENGTHS,
    MASKS,
    Cell,
    EngineRows,
    Sources,
    all_cells,
    load_sources,
    make_chain,
    quick_cells,
)
from eval.bench.bench_report import (
    ALL,
    BASELINES,
    FLOOR,
    FORMAT,
    LIMITS,
    OURS,
    PREFILL_IMPLS,
    PREFILL_LIMITS,
    Index,
    checks,
    dump,
    hint_ratios,
    measured_in,
    worst_ratios,
)
from eval.bench.kernel_timing import POISON, Chain, ChainRun, Prepared, chain_of
from eval.bench.our_kernels import VARIANTS, WITH_INDICES, prepare_ours
from eval.bench.trace_scores import trace_scores
from eval.common.machine import describe_machine, write_json
from eval.common.options import read_results
from eval.common.paths import ROOT
from eval.fuzz import fuzz, fuzz_blocks, fuzz_cases, fuzz_contents, fuzz_prefill
from eval.report import provenance, readme_table
from gvr_topk.arguments import BlocksArguments, DecodeArguments, InBlocksArguments, PrefillArguments
from gvr_topk.constants import (
    FLAG_PDL,
    PHASE_STAMPS,
    STATE_FLOATS,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    HintReason,
)
from gvr_topk.constants import (
    Path as KernelPath,
)
from gvr_topk.contract import exact_topk
from gvr_topk.evaluation.synthetic import LayerGenerator
from gvr_topk.evaluation.trace import TraceError, shipped_trace

BLOCK_OPS: dict[str, type[Any]] = {"blocks": BlocksArguments, "in_blocks": InBlocksArguments}


@pytest.fixture(autouse=True)
def short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chains on the CPU be as short as a chain can be, whatever a row's size."""
    monkeypatch.setattr(kernel_timing, "MIN_STEPS", 6)
    monkeypatch.setattr(kernel_timing, "MAX_STEPS", 6)


def result(
    cell: Cell, impl: str, cold: float | None, exact: bool | None = True, **more: Any
) -> dict[str, Any]:
    return {"cell": cell.key, "impl": impl, "cold_us": cold, "exact": exact, **more}


def file_of(*results: tuple[Cell, dict[str, Any]]) -> dict[str, Any]:
    """Content of a result file with these results at these cells."""
    machine = {"device": "a GPU", "torch": "2", "commit": "abc", "date": "2026-11-22"}
    return {
        "format": FORMAT,
        "method": "",
        "runs": [
            {
                "machine": machine,
                **{name: list(VARIANTS[name].arguments) for name in ("hinted", "no_hint")},
                "baselines": {},
                "sets_in_20_runs": {"hinted": 1},
            }
        ],
        "cells": {cell.key: cell.as_json() for cell, _ in results},
        "results": [its for _, its in results],
    }


def index_of(*results: tuple[Cell, dict[str, Any]]) -> Index:
    return Index(file_of(*results))


def test_trace_scores_by_hand() -> None:
    keys = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=np.float16)
    queries = np.array([[[1.0, 1.0]], [[-1.0, 1.0]]], dtype=np.float16)
    weights = np.array([[2.0], [1.0]], dtype=np.float16)
    rows = trace_scores(keys, queries, weights, "cpu")
    wanted = [[[2 / 2**0.5, 4 / 2**0.5]], [[0.0, 2 / 2**0.5, 0.0]]]
    for row, values in zip(rows, wanted, strict=True):
        torch.testing.assert_close(row, torch.tensor(values))


class TestCells:
    def test_keys_are_unique(self) -> None:
        keys = [cell.key for cell in all_cells()]
        assert len(keys) == len(set(keys))

    def test_main_sweep_covers_every_length_and_batch(self) -> None:
        main = {(cell.n, cell.batch) for cell in all_cells() if cell.group == "main"}
        assert main == {(n, batch) for n in LENGTHS for batch in BATCHES}
        assert set(LIMITS) <= main

    def test_rows_in_wide_buffers_are_those_of_narrow_ones(self) -> None:
        cells = [cell for cell in all_cells() if cell.group == "wide_buffers"]
        assert {cell.width for cell in cells} == {0, 131072, 1048576}
        assert all(cell.key.endswith(f" in{cell.width}") for cell in cells if cell.width)
        own, wide = (make_chain(Cell("wide_buffers", 300, k=16, width=at), device="cpu") for at in (0, 1024))
        assert own.logits.shape[2] == 304 and wide.logits.shape[2] == 1024
        assert torch.equal(own.logits[..., :300], wide.logits[..., :300])
        assert bool(wide.logits[..., 300:].isnan().all()) and torch.equal(own.lengths, wide.lengths)

    def test_files_add_a_cell_each(self) -> None:
        sources = Sources([LayerGenerator(20, 4000, 6)], [EngineRows("e", (torch.zeros(8, 65559),))])
        cells = [cell for cell in all_cells(sources) if cell.group in ("trace", "engine")]
        shapes = [(cell.n, cell.batch, cell.rows) for cell in cells]
        assert shapes == [(4000, 1, "trace:synthetic-L20"), (65559, 8, "engine:e")]
        assert {cell.group for cell in all_cells(sources)} == set(GROUPS)

    def test_quick_cells_are_those_that_our_own_limits_need(self) -> None:
        cells = all_cells(Sources([LayerGenerator(20, 4000, 6)], [EngineRows("e", (torch.zeros(8, 64),))]))
        quick = quick_cells(cells)
        assert {(cell.n, cell.batch) for cell in quick if cell.group == "main"} == set(LIMITS)
        found = checks(
            index_of(
                *(
                    (c, result(c, i, 1.0, worst_us=1.0))
                    for c in quick
                    for i in bench_kernels.QUICK
                    if measured_in(i, c.group)
                )
            )
        )
        unmeasured = [check["what"] for check in found if check["reached"] is None]
        assert all(
            "trtllm" in what or "adversarial" in what or "positions kept beside it" in what
            for what in unmeasured
        )

    def test_folder_may_hold_other_archives(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "logits.npz", logits=np.zeros((2, 8)))
        np.savez(tmp_path / "engine.npz", **{f"{at}.logits": np.ones((2, 8), np.float32) for at in range(3)})
        sources = load_sources(tmp_path)
        assert [source.name for source in sources.traces] == [shipped_trace().name]
        assert [(engine.name, len(engine.layers)) for engine in sources.engines] == [("engine", 3)]
        (tmp_path / "broken.npz").write_bytes(b"no archive")
        with pytest.raises(TraceError, match="broken"):
            load_sources(tmp_path)

    def test_selection_by_group_and_key(self) -> None:
        cells = all_cells()
        assert {cell.group for cell in bench_kernels.select(cells, "hint,k", "")} == {"hint", "k"}
        picked = bench_kernels.select(cells, "main", "n70690 b1 ")
        assert [(cell.n, cell.batch) for cell in picked] == [(70690, 1)]
        with pytest.raises(typer.BadParameter, match="nothing"):
            bench_kernels.select(cells, "nothing", "")

    def test_our_kernels_refuse_what_cannot_be_planned(self) -> None:
        cell = Cell("main", 524288)
        assert "262144" in bench_kernels.ours("paper").refuse(cell)
        assert bench_kernels.ours("hinted").refuse(cell) == ""
        assert "main" in bench_kernels.ours("pdl").refuse(Cell("k", 8192, k=512))


def chain_for(rows: str = "gauss", n: int = 300, batch: int = 2, **more: Any) -> Chain:
    sources = Sources(
        [LayerGenerator(20, n - 9, 10)],
        [EngineRows("e", tuple(torch.randn(4, n) for _ in range(2)))],
    )
    return make_chain(Cell("any", n, batch, k=16, rows=rows, **more), sources, device="cpu")


class TestChains:
    @pytest.mark.parametrize(
        "rows, batch",
        [
            ("gauss", 2),
            ("scale", 2),
            ("mask:half", 2),
            ("layer:20", 1),
            ("trace:synthetic-L20", 1),
            ("engine:e", 4),
        ],
    )
    def test_no_launch_sees_the_row_of_the_one_before(self, rows: str, batch: int) -> None:
        chain = chain_for(rows, batch=batch)
        walk = [*range(chain.count), chain.lead]  # from the last step, a walk goes on with the first
        for before, step in itertools.pairwise(walk):
            for row in range(batch):
                old, new = chain.logits[before, row], chain.logits[step, row]
                assert not torch.equal(old.nan_to_num(), new.nan_to_num()), (before, step)

    def test_gaussian_rows_are_all_fresh_and_follow_each_other(self) -> None:
        chain = chain_for(n=20_000, batch=1, keep=0.81)
        assert chain.fresh == len(chain.timed) == 6
        rows = chain.logits[:, 0, :20_000]
        seen = torch.corrcoef(rows)
        for step in range(1, chain.count):
            assert float(seen[step - 1, step]) == pytest.approx(0.9, abs=0.02)
            assert float(rows[step].std()) == pytest.approx(1.0, abs=0.03)
        assert float(seen[0, 2]) == pytest.approx(0.81, abs=0.02)

    def test_shifted_scores_move_with_the_offset(self) -> None:
        chain = chain_for(n=20_000, batch=1, keep=1.0, shift=3)
        rows = chain.logits[:, 0, :20_000]
        assert torch.allclose(rows[1].roll(3), rows[2], atol=1e-5)
        assert chain.shift == 3

    def test_scale_changes_at_every_step(self) -> None:
        deviations = chain_for("scale", n=20_000, batch=1).logits[:, 0].nan_to_num().std(dim=1)
        assert float(deviations.max() / deviations.min()) > 1.5
        assert bool(((deviations > 0.12) & (deviations < 8.5)).all())

    @pytest.mark.parametrize("kind", MASKS)
    def test_masks_put_the_kth_value_where_their_name_says(self, kind: str) -> None:
        chain = chain_for(f"mask:{kind}", n=4000, batch=1)
        for step in chain.timed:
            row = chain.logits[step, 0, :4000]
            kth = row.topk(16).values[-1]
            finite = int(row.isfinite().sum())
            if kind == "kth_is_neg_inf":
                assert bool(kth == float("-inf")) and 0 < finite < 16
            elif kind == "kth_is_pos_inf":
                assert bool(kth == float("inf"))
            elif kind == "kth_is_nan":
                assert bool(kth.isnan())
            else:
                assert bool(kth.isfinite())
            if kind == "99_percent":
                assert 16 < finite < 80

    def test_given_steps_begin_again_in_new_buffers_and_are_led_by_the_last(self) -> None:
        steps = [torch.full((1, 8 + at), float(at)) for at in range(4)]
        chain = chain_of(steps, 2, device="cpu")
        assert chain.logits[:, 0, 0].tolist() == [0, 1, 2, 3, *([0, 1, 2, 3] * 2)]
        assert (chain.lead, chain.fresh, len(chain.timed)) == (4, 4, 8)
        assert chain.lengths_of(5).tolist() == [9]
        assert bool(chain.logits[5, 0, 9:].isnan().all())

    def test_engine_rows_meet_every_slot(self) -> None:
        layers = tuple(torch.arange(4.0)[:, None] + 10 * layer + torch.zeros(4, 8) for layer in range(2))
        steps = EngineRows("e", layers).steps()
        assert len(steps) == 8
        assert [step[0, 0].item() for step in steps] == [0, 10, 1, 11, 2, 12, 3, 13]

    def test_cold_chains_outgrow_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_timing, "MIN_STEPS", 20)
        monkeypatch.setattr(kernel_timing, "MAX_STEPS", 4000)
        monkeypatch.setattr(kernel_timing, "l2_bytes", lambda device: 60 << 20)
        assert kernel_timing.steps_for(131072 * 4, "cuda") * 131072 * 4 > 4 * (60 << 20)
        assert kernel_timing.steps_for(8192 * 4, "cuda") == 4000
        assert kernel_timing.steps_for(1 << 30, "cuda") == 20

    def test_scores_of_a_trace_are_its_own(self) -> None:
        trace = shipped_trace()
        steps = bench_cases.trace_rows(trace, "cpu")
        assert len(steps) == trace.steps
        assert np.allclose(steps[7][0].numpy(), trace.scores(7), rtol=1e-4, atol=1e-5)

    def test_rows_of_no_kind_are_refused(self) -> None:
        with pytest.raises(ValueError, match="rows: wanted gauss"):
            chain_for("nothing")
        with pytest.raises(ValueError, match="one of the files"):
            chain_for("trace:nothing")


class TestChainRun:
    def test_every_replay_begins_with_the_state_of_the_step_before(self) -> None:
        chain = chain_for()
        prepared = prepare_ours(chain, VARIANTS[WITH_INDICES])
        run = ChainRun(chain, prepared)
        words, indices = prepared.state
        leading = prepared.results[chain.lead - 1].clone()
        assert prepared.carried is not None
        assert torch.equal(prepared.carried(), leading)
        saved = words.clone()
        assert int((saved != STATE_UNKNOWN).any(dim=1).sum()) == chain.batch
        for _ in range(2):
            for step in chain.timed:
                prepared.launch(step)
            assert not torch.equal(prepared.carried(), leading)
            run.begin()
            assert torch.equal(prepared.carried(), leading)
            assert torch.equal(words, saved)
            assert int((indices >= 0).sum()) == leading.numel()
            assert bool((prepared.results == POISON).all())

    def test_launches_are_timed_in_the_order_of_the_chain(self) -> None:
        chain, order = chain_for(), []
        run = ChainRun(chain, Prepared(order.append, torch.zeros(1)))
        assert order == list(range(chain.lead))
        order.clear()
        run.time(3)
        assert order == 3 * list(chain.timed)
        order.clear()
        assert len(run.time_each(8, passes=3)) == 8
        assert order == 3 * [*chain.timed, *chain.timed[:2]]

    @pytest.mark.parametrize("name", VARIANTS)
    def test_variants_give_the_op_what_their_name_says(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[DecodeArguments] = []
        monkeypatch.setattr(our_kernels, "launch_op", given.append)
        variant = VARIANTS[name]
        prepare_ours(chain_for(shift=1), variant).launch(0)
        (arguments,) = given
        has = {what for what in ("state", "indices", "row_slot") if getattr(arguments, what) is not None}
        every = {"state", "indices", "row_slot"}
        others: dict[str, set[str]] = {
            "no_hint": set(),
            "radix_rounds": set(),
            "no_row_slot": {"state"},
            "with_indices": every,
            "paper": every,
        }
        assert has == others.get(name, {"state", "row_slot"})
        named = {what for what in variant.arguments if "=" not in what}
        assert has - {"indices"} | {"out"} == named
        assert (f'path="{variant.path}"' in variant.arguments) == (arguments.path != KernelPath.AUTO)
        assert ("pdl=True" in variant.arguments) == bool(arguments.flags & FLAG_PDL) == (name == "pdl")
        assert arguments.hint_offset == ("indices" in has)
        if "row_slot" in has:
            slots = arguments.row_slot.tolist()
            assert len(set(slots)) == 2 and max(slots) < len(arguments.state)


class TestCellRun:
    cell = Cell("scale", 300, 2, k=16, rows="scale")

    def run(self) -> bench_kernels.CellRun:
        return bench_kernels.CellRun(self.cell, Sources(), "cpu", each_launches=8)

    @pytest.mark.parametrize("name", ["hinted", "no_hint"])
    def test_exact_op_is_timed_as_a_whole_and_by_launch(self, name: str) -> None:
        measured = self.run().measure(bench_kernels.ours(name))
        assert measured["exact"] is True
        assert measured["cold_us"] > 0
        assert measured["worst_us"] >= measured["cold_us"]
        assert {"guess_hit", "passes", "each_us"} <= set(measured)
        json.dumps(measured, allow_nan=False)

    def test_cell_says_what_was_made(self) -> None:
        described = self.run().describe()
        assert (described["launches"], described["fresh"], described["group"]) == (6, 6, "scale")
        assert 0.3 < described["hit_ratio"] < 0.9

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
        monkeypatch.setattr(bench_kernels, "EACH_GROUPS", ())
        monkeypatch.setattr(bench_kernels, "BUDGET_SECONDS", 0.0)
        monkeypatch.setattr(bench_kernels, "MEASURED", {})
        measured = run.measure(bench_kernels.ours("with_indices" if broken == "carried" else "hinted"))
        assert measured["exact"] is False
        assert "wrong rows in 3 replays" in measured["note"]

    def test_wrong_launch_among_those_timed_one_by_one_is_noticed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.run()
        real = ChainRun.time_each

        def time_each(self: ChainRun, launches: int, passes: int = 3) -> list[float]:
            times = real(self, launches, passes)
            self.prepared.results[run.chain.timed[1], 0, 0] += 1
            return times

        monkeypatch.setattr(ChainRun, "time_each", time_each)
        assert run.measure(bench_kernels.ours("hinted"))["exact"] is False

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

        measured = run.measure(bench_kernels.Implementation("torch", lambda cell: "", prepare))
        assert measured["exact"] is not broken

    def test_error_is_a_result(self) -> None:
        def prepare(chain: Chain) -> Prepared:
            raise RuntimeError("out of memory\nmore")

        measured = self.run().measure(bench_kernels.Implementation("torch", lambda cell: "", prepare))
        assert (measured["cold_us"], measured["exact"]) == (None, False)
        assert measured["note"] == "RuntimeError: out of memory"

    def test_op_gives_one_set_in_all_runs(self) -> None:
        assert bench_kernels.repeatability([bench_kernels.ours("hinted")], "cpu") == {"hinted": 1}


class TestTwoLevelIndexer:
    CELL = Cell("v41", 16_400, 2, k=16, rows="blocks")
    IMPLEMENTATIONS = ("blocks", "in_blocks", "torch_blocks", "torch_in_blocks")

    def measure(self, name: str) -> dict[str, Any]:
        run = bench_kernels.CellRun(self.CELL, Sources(), device="cpu")
        if name in bench_kernels.OURS:
            return run.measure(bench_kernels.ours(name))
        return run.measure(bench_kernels.theirs(baselines.available()[name]))

    def test_cells_are_those_of_the_model(self) -> None:
        cells = [cell for cell in all_cells() if cell.group == "v41"]
        assert {(cell.n, cell.batch) for cell in cells} == {
            (n, batch) for n in (16384, 65536, 131072, 262144) for batch in (1, 8, 64)
        }
        assert {cell.k for cell in cells} == {512} and bench_blocks.BLOCK_K == 2048
        assert len({cell.key for cell in all_cells()}) == len(all_cells())

    def test_it_has_implementations_of_its_own(self) -> None:
        assert {impl for impl in ALL if measured_in(impl, "v41")} == set(self.IMPLEMENTATIONS)

    @pytest.mark.parametrize("name", IMPLEMENTATIONS)
    def test_every_implementation_is_exact(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_kernels, "BUDGET_SECONDS", 0.0)
        measured = self.measure(name)
        assert measured["exact"] is True and measured["cold_us"] > 0 and "note" not in measured

    @pytest.mark.parametrize(("op", "name"), [("blocks", "out"), ("blocks", "blocks"), ("in_blocks", "out")])
    def test_one_wrong_item_is_noticed(self, op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = our_kernels.launch_op, itertools.count()

        def launch(arguments: Any) -> None:
            real(arguments)
            if isinstance(arguments, BLOCK_OPS[op]) and next(calls) == 9:
                getattr(arguments, name)[1, 3] += 1

        monkeypatch.setattr(bench_kernels, "BUDGET_SECONDS", 0.0)
        monkeypatch.setattr(our_kernels, "launch_op", launch)
        measured = self.measure(op)
        assert measured["exact"] is False and measured["note"] == "1 wrong rows in 3 replays"

    @pytest.mark.parametrize("name", ["torch_blocks", "torch_in_blocks"])
    def test_wrong_items_of_others_are_noticed(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(baselines, f"_{name}")

        def prepare(chain: Chain) -> Prepared:
            prepared = real(chain)

            def launch(step: int) -> None:
                prepared.launch(step)
                prepared.results[step][0, -1] = prepared.results[step][0, -2]

            return dataclasses.replace(prepared, launch=launch)

        monkeypatch.setattr(baselines, f"_{name}", prepare)
        monkeypatch.setattr(bench_kernels, "BUDGET_SECONDS", 0.0)
        assert self.measure(name)["exact"] is False


CAUSAL = Cell("prefill", 300, 200, k=64, rows="causal")


class TestPrefillChunks:
    def test_each_row_sees_one_column_more_and_the_last_all(self) -> None:
        chain = make_chain(CAUSAL, device="cpu")
        assert chain.lengths.tolist() == list(range(101, 301))
        assert (chain.lead, chain.fresh, len(chain.timed)) == (0, 1, kernel_timing.CHUNK_BUFFERS)
        for row, length in enumerate(chain.lengths.tolist()):
            assert bool(chain.logits[0, row, :length].isfinite().all())
            assert bool(chain.logits[0, row, length:].isnan().all())
        assert all(torch.equal(copy.nan_to_num(), chain.logits[0].nan_to_num()) for copy in chain.logits)
        assert chain.logits[1].data_ptr() != chain.logits[0].data_ptr()

    def test_rows_are_the_same_however_few_are_drawn_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = make_chain(CAUSAL, device="cpu").logits.nan_to_num()
        monkeypatch.setattr(bench_cases, "GENERATED_ELEMENTS", 16 * 300)
        assert torch.equal(make_chain(CAUSAL, device="cpu").logits.nan_to_num(), first)

    def test_large_chunks_have_one_buffer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_timing, "CHUNKS_BYTES", 200 * 304 * 4 * 3 - 1)
        assert make_chain(CAUSAL, device="cpu").count == 2
        monkeypatch.setattr(kernel_timing, "CHUNKS_BYTES", 1)
        assert make_chain(CAUSAL, device="cpu").count == 1

    def test_rows_of_a_trace_are_repeated_in_their_order(self) -> None:
        source = LayerGenerator(20, 100, 10)
        cell = Cell("prefill", 109, 25, k=16, rows="causal:synthetic-L20")
        chain = make_chain(cell, Sources([source]), device="cpu")
        assert chain.lengths.tolist() == [*range(100, 110), *range(100, 110), *range(100, 105)]
        for row in (0, 9, 10, 24):
            scores = source.scores(row % 10)
            assert np.array_equal(chain.logits[0, row, : len(scores)].numpy(), scores)
            assert bool(chain.logits[0, row, len(scores) :].isnan().all())

    def test_each_trace_has_a_chunk_as_wide_as_its_last_row(self) -> None:
        cells = all_cells(Sources([LayerGenerator(20, 4000, 6)]))
        shapes = {(cell.n, cell.batch): cell.rows for cell in cells if cell.group == "prefill"}
        assert shapes == {**dict.fromkeys(PREFILL_LIMITS, "causal"), (4005, 2048): "causal:synthetic-L20"}

    def test_more_rows_than_columns_are_refused(self) -> None:
        with pytest.raises(ValueError, match="rows: wanted at most one for each of the 100 columns, got 200"):
            make_chain(dataclasses.replace(CAUSAL, n=100), device="cpu")

    def test_traffic_is_that_of_windows_and_items(self) -> None:
        lengths = torch.tensor([2, 5, 6], dtype=torch.int32)
        chain = Chain(torch.zeros(1, 3, 8), lengths, 4, lead=0, fresh=1)
        traffic = bench_cases.memory_traffic(chain, 2e9)
        assert traffic["bytes_read"] == 4 * (5 + 6) + 3 * 2 * 4
        assert traffic["bytes_written"] == 4 * 3 * 4
        assert traffic["memory_us"] == round(1e6 * (68 + 48) / 2e9, 4)
        assert "memory_us" not in bench_cases.memory_traffic(chain)  # of an unknown memory


class TestPrefillRun:
    def run(self, cell: Cell = CAUSAL) -> bench_kernels.CellRun:
        return bench_kernels.CellRun(cell, Sources(), "cpu")

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """Files of other projects, whose operators for prefill are there and exact, with their schemas."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(baselines, "load_library", lambda folder, name: None)
        for name in ("libtrtllm_kernel.so", "_C_stable_libtorch.abi3.so"):
            (tmp_path / name).touch()

        def exact(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
            return exact_topk(logits, ends - starts, k, starts).flip(1)

        def per_row(logits, starts, ends, indices, rows, stride0, stride1, k):  # type: ignore[no-untyped-def]
            assert (rows, stride0, stride1) == (len(logits), *logits.stride())
            indices.copy_(exact(logits, starts, ends, k))

        def indexer(logits, starts, ends, indices, k=2048):  # type: ignore[no-untyped-def]
            indices.copy_(exact(logits, starts, ends, k))

        vllm, trtllm = torch.library.Library("_C", "FRAGMENT"), torch.library.Library("trtllm", "FRAGMENT")
        vllm.define(
            "top_k_per_row_prefill(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, "
            "int numRows, int stride0, int stride1, int topK) -> ()"
        )
        vllm.impl("top_k_per_row_prefill", per_row, "CPU")
        trtllm.define(
            "indexer_topk_prefill(Tensor logits, Tensor row_starts, Tensor row_ends, Tensor indices, "
            "int index_topk=2048) -> ()"
        )
        trtllm.impl("indexer_topk_prefill", indexer, "CPU")
        yield tmp_path
        vllm._destroy()
        trtllm._destroy()

    def test_every_implementation_is_timed_and_exact(self, folder: Path) -> None:
        run = self.run(dataclasses.replace(CAUSAL, n=200))
        found, described = bench_kernels.implementations(PREFILL_IMPLS, folder)
        assert {its.name for its in found} == set(PREFILL_IMPLS) - {
            "flashinfer_ragged",
            "flashinfer_deterministic",
        }
        assert "topk.so" in described["flashinfer_ragged"]["why_not"]
        for its in found:
            measured = run.measure(its)
            assert (measured["exact"], measured["cold_us"] > 0) == (True, True), measured
            assert ("passes" in measured) == (its.name in OURS)

    def test_cell_says_what_the_memory_takes(self) -> None:
        described = self.run().describe()
        assert (described["launches"], described["fresh"]) == (kernel_timing.CHUNK_BUFFERS, 1)
        assert described["bytes_read"] == 4 * sum(range(101, 301)) + 8 * 200
        assert "hit_ratio" not in described

    @pytest.mark.parametrize("name", ["prefill", "prefill_radix_rounds"])
    def test_op_is_called_with_the_path_of_its_name(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[PrefillArguments] = []
        monkeypatch.setattr(our_kernels, "launch_op", given.append)
        chain = make_chain(CAUSAL, device="cpu")
        bench_kernels.ours(name).prepare(chain).launch(1)
        (arguments,) = given
        wanted = KernelPath.AUTO if name == "prefill" else KernelPath.RADIX_ROUNDS
        assert (arguments.path, arguments.k, arguments.flags) == (wanted, 64, 0)
        assert arguments.logits.data_ptr() == chain.logits[1].data_ptr()
        assert not arguments.row_starts.any() and arguments.row_ends is chain.lengths
        others = ("row_request", "offsets", "counts", "page_table", "slots", "stats")
        assert all(getattr(arguments, what) is None for what in others)

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
        monkeypatch.setattr(bench_kernels, "BUDGET_SECONDS", 0.0)
        measured = run.measure(bench_kernels.ours("prefill"))
        assert measured["exact"] is False
        assert measured["note"] == "3 wrong rows in 3 replays"

    def test_positions_behind_a_row_count_as_none_of_those_alone_that_know_no_lengths(self) -> None:
        run = self.run(dataclasses.replace(CAUSAL, n=200))
        for name, exact in (("torch", True), ("vllm_prefill", False)):
            measured = run.measure(bench_kernels.Implementation(name, lambda cell: "", baselines._torch))
            assert measured["exact"] is exact

    def test_slow_calls_of_others_are_not_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_kernels, "SLOW_SECONDS", 0.01)

        def prepare(chain: Chain) -> Prepared:
            return Prepared(lambda step: time.sleep(0.02), baselines._results(chain))

        slow = bench_kernels.Implementation("torch", lambda cell: "", prepare)
        measured = self.run().measure(slow)
        assert (measured["cold_us"], measured["exact"]) == (None, None)
        assert measured["note"] == "one call takes 0.0 s, more than 0.01 s"

    def test_chunks_have_implementations_of_their_own(self) -> None:
        assert {impl for impl in ALL if measured_in(impl, "prefill")} == set(PREFILL_IMPLS)
        decode = {impl for impl in ALL if measured_in(impl, "main")}
        assert decode == {impl for impl in ALL if "prefill" not in impl and "blocks" not in impl}

    def test_limits_are_checked(self) -> None:
        cells = [Cell("prefill", n, rows, rows="causal") for n, rows in PREFILL_LIMITS]
        index = index_of(*((cell, result(cell, "prefill", 300.0)) for cell in cells))
        met = {c["limit"]: c["met"] for c in checks(index) if "causal chunk" in c["what"]}
        assert met == {75.0: False, 85.0: False, 310.0: True, 280.0: False, 1080.0: True}


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
    hint = Cell("hint", 70690, keep=0.0)
    engine = Cell("engine", 65559, 8, rows="engine:e")
    mask = Cell("mask", 70690, rows="mask:kth_is_nan")

    def index(self) -> Index:
        return index_of(
            (self.main, result(self.main, "hinted", 4.0)),
            (self.main, result(self.main, "no_hint", 5.0)),
            (self.main, result(self.main, "with_indices", 5.5)),
            (self.main, result(self.main, "trtllm", 20.0)),
            (self.main, result(self.main, "vllm", 2.0, exact=False)),
            (self.hint, result(self.hint, "hinted", 5.2)),
            (self.hint, result(self.hint, "no_hint", 5.0)),
            (self.hint, result(self.hint, "trtllm", 10.4)),
            (self.hint, result(self.hint, "torch", None, exact=None, note="refused")),
            (self.engine, result(self.engine, "hinted", 12.0, worst_us=20.0)),
            (self.engine, result(self.engine, "no_hint", 10.0, worst_us=11.0)),
            (self.mask, result(self.mask, "hinted", 12.0)),
        )

    def checks(self) -> dict[str, Any]:
        return {check["what"]: check for check in checks(self.index())}

    def test_worst_ratio_is_over_all_cells_and_right_answers(self) -> None:
        rows = {row["other"]: row for row in worst_ratios(self.index())}
        assert set(rows) == {"trtllm", "no_hint"}
        assert rows["trtllm"]["ratio"] == 2.0
        assert rows["trtllm"]["cell"] == self.hint.key
        assert rows["trtllm"]["cells"] == 2
        assert rows["trtllm"]["geometric_mean"] == pytest.approx(10**0.5, abs=1e-4)

    def test_checks_say_met_missed_and_not_measured(self) -> None:
        found = self.checks()
        reached = found["us at N = 70,690, batch 1, fresh Gaussian chain"]
        assert (reached["limit"], reached["reached"], reached["met"]) == (4.8, 4.0, True)
        assert found["us at N = 8,192, batch 1, fresh Gaussian chain"]["met"] is None
        assert found["us, real traces"]["met"] is None

    def test_hint_is_held_to_the_time_without_where_rows_do_not_change_at_random(self) -> None:
        found = self.checks()
        usual = found["time with over without a hint (hint as integrations give it), any cell"]
        assert (usual["reached"], usual["met"], usual["where"]) == (1.04, False, self.hint.key)
        alone = found["time with over without a hint (positions kept beside it), any cell"]
        assert (alone["reached"], alone["met"]) == (1.1, False)
        assert [row["ratio"] for row in hint_ratios(self.index())] == [0.8, 1.04, 1.2]

    def test_changing_rows_have_limits_of_their_own(self) -> None:
        found = self.checks()
        assert found["engine rows: time with over without a hint"]["reached"] == 1.2
        worst = found["engine rows: worst launch of 1,000 with over mean launch without a hint"]
        assert (worst["reached"], worst["met"]) == (2.0, False)

    def test_masked_rows_are_held_to_the_usual_time_of_their_shape(self) -> None:
        masked = self.checks()["masked over usual rows of the shape, with a hint"]
        assert (masked["reached"], masked["met"], masked["where"]) == (3.0, False, self.mask.key)

    def test_inexact_kernel_of_ours_reaches_nothing(self) -> None:
        found = checks(index_of((self.main, result(self.main, "hinted", 1.0, exact=False))))
        assert all(check["reached"] is None for check in found)

    def test_no_hint_is_held_to_trtllm_at_batches_1_8_64(self) -> None:
        results = []
        for batch, us in ((1, 10.0), (8, 12.0), (128, 1.0)):
            cell = Cell("main", 4096, batch)
            results += [(cell, result(cell, "no_hint", 10.0)), (cell, result(cell, "trtllm", us))]
        found = {check["what"]: check for check in checks(index_of(*results))}
        check = found["no hint: speedup over trtllm, every N, batch 1, 8, 64"]
        assert (check["reached"], check["met"]) == (1.0, True)

    def test_failed_results_are_measured_again(self) -> None:
        assert bench_kernels._failed(result(self.main, "hinted", 4.0, exact=False))
        assert bench_kernels._failed(result(self.main, "trtllm", None, exact=False))
        assert not bench_kernels._failed(result(self.main, "trtllm", 4.0, exact=False))
        assert not bench_kernels._failed(result(self.main, "trtllm", None, exact=None))

    def test_every_table_prints(self) -> None:
        console = Console(width=200, file=io.StringIO())
        data = file_of(*((c, result(c, "hinted", 4.0)) for c in (self.main, self.engine)))
        bench_kernels.report(data, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "70,690 x 1" in text
        assert "not measured" in text


class TestFiles:
    def data(self) -> dict[str, Any]:
        return file_of(
            *(
                (Cell("main", n), result(Cell("main", n), impl, 1.0 + n / 1e4))
                for n in (4096, 70690)
                for impl in ("hinted", "trtllm", "read_floor")
            )
        )

    def test_load_refuses_another_format(self, tmp_path: Path) -> None:
        path = tmp_path / "other.json"
        path.write_text('{"format": "gvr_topk.bench_kernels/2"}')
        with pytest.raises(
            typer.BadParameter, match=r"other\.json.*wanted format.*got 'gvr_topk.bench_kernels/2'"
        ):
            read_results(path, FORMAT)

    def test_written_file_carries_ratios_and_checks(self, tmp_path: Path) -> None:
        path = tmp_path / "bench.json"
        bench_kernels._write(self.data(), path)
        written = read_results(path, FORMAT)
        assert written["worst_ratios"][0]["other"] == "trtllm"
        assert len(written["checks"]) >= len(LIMITS)
        assert list(tmp_path.iterdir()) == [path]
        assert written["cells"] == self.data()["cells"]

    def test_one_result_is_one_line(self) -> None:
        lines = dump(self.data()).splitlines()
        assert sum('"impl"' in line for line in lines) == 6
        assert all(json.loads(line.strip().rstrip(","))["impl"] for line in lines if '"impl"' in line)

    def test_files_are_strict(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="JSON"):
            write_json(tmp_path / "x.json", {"a": float("nan")})
        with pytest.raises(ValueError, match="JSON"):
            dump({"results": [{"a": float("nan")}]})

    def test_plot_draws_every_implementation(self, tmp_path: Path) -> None:
        plot_bench.draw(self.data(), tmp_path / "bench.svg", (1,), everything=True)
        text = (tmp_path / "bench.svg").read_text()
        assert all(
            f"<!-- {label} -->" in text for label in ("gvr_topk", "TensorRT-LLM", "reading the row alone")
        )
        plot_bench.draw(self.data(), tmp_path / "few.svg", (1,))
        few = (tmp_path / "few.svg").read_text()
        assert "<!-- gvr_topk -->" in few and "TensorRT-LLM" not in few and len(plot_bench.FEW) == 5
        undrawn = {"no_row_slot", "with_indices", "pdl", *(impl for impl in ALL if "prefill" in impl)}
        undrawn |= {impl for impl in ALL if "blocks" in impl}
        assert set(plot_bench.STYLES) == {*ALL, FLOOR} - undrawn

    def test_plot_names_the_versions_and_commits_of_what_it_draws(self, tmp_path: Path) -> None:
        data = self.data()
        first, second = data["runs"][0], json.loads(json.dumps(data["runs"][0]))
        second["machine"]["commit"] = "0ther"
        first["baselines"]["trtllm"] = {"version": "TensorRT-LLM 9.8.7rc1 some_op (file)", "why_not": ""}
        data["runs"].append(second)
        for cell, run in ((Cell("main", 4096, 8), 1), (Cell("main", 4096), 0)):
            data["cells"][cell.key] = cell.as_json()
            data["results"].append(result(cell, "hinted", 3.0, run=run))
        plot_bench.draw(data, tmp_path / "bench.svg", (1,), everything=True)
        text = (tmp_path / "bench.svg").read_text()
        assert "<!-- TensorRT-LLM 9.8.7rc1 -->" in text
        assert "k = 2048: a GPU, torch 2, commit abc -->" in text  # nothing of the second run is drawn
        plot_bench.draw(data, tmp_path / "bench.svg", (1, 8))
        assert "commit abc, 0ther -->" in (tmp_path / "bench.svg").read_text()

    def test_picture_names_the_file_that_it_was_drawn_from(self, tmp_path: Path) -> None:
        bench, image = tmp_path / "bench.json", tmp_path / "bench.png"
        bench_kernels._write(self.data(), bench)
        plot_bench.main(bench, image, "1")
        assert picture.digest_in(image) == provenance.digest_of(bench)
        plot_bench.draw(self.data(), image, (1,))
        assert picture.digest_in(image) is None
        assert picture.digest_in(bench) is None and picture.digest_in(tmp_path / "none.png") is None

    def test_plot_names_a_batch_without_results(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="batch"):
            plot_bench.draw(self.data(), tmp_path / "bench.png", (64,))

    def test_machine_is_described_without_a_gpu(self) -> None:
        described = describe_machine("abc")
        assert described["commit"] == "abc"
        assert described["torch"] == torch.__version__
        json.dumps(described, allow_nan=False)


def test_report_fits_80_columns() -> None:
    data = json.loads((readme_table.RESULTS / "bench.json").read_text())
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        bench_kernels.report(data, console)
    lines = capture.get().splitlines()
    assert max(len(line) for line in lines) <= 80
    index = Index(data)
    ours = [index.entry(index.main(70690, 1), impl) for impl in OURS]
    # A file holds the ways to call the op that there were.
    assert "70,690 x 1 " + " ".join(time for time in ours if time != "-") in [
        " ".join(line.split()) for line in lines
    ]


def commits_compared(trial: Path) -> set[str]:
    """Commit of a trial that compared rows inside an engine; nothing of another."""
    data = json.loads(trial.read_text())
    return {data["machine"]["commit"]} if any(engine.get("compared") for engine in data["engines"]) else set()


class TestReadmeTable:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Result files of a whole benchmark with made-up figures, beside the real other ones."""
        folder = tmp_path / "results" / "h1"
        folder.mkdir(parents=True)
        others = set(readme_table.RESULTS.parent.glob("*/*.json")) - set(readme_table.RESULTS.glob("*"))
        for path in (
            *sorted(others),
            *readme_table.RESULTS.glob("*.json"),
        ):  # of the pages' GPU, if it has one
            if not path.stem[-2:].startswith("_"):  # of several runs the first
                shutil.copy(path, folder)
        sources = Sources([LayerGenerator(20, 32513, 256)], [EngineRows("e", (torch.zeros(8, 65559),))])
        results = []
        for cell in all_cells(sources):
            for impl in (*(impl for impl in ALL if measured_in(impl, cell.group)), FLOOR):
                exact = None if impl == FLOOR else True
                us = 4.0 if impl == "hinted" else 8.0
                results.append((cell, result(cell, impl, us, exact, worst_us=9.0, run=0)))
        data = file_of(*results)
        data["runs"][0]["sets_in_20_runs"] = dict.fromkeys(ALL, 1)
        bench_kernels._write(data, folder / "bench.json")
        for at, (commit, date) in enumerate(
            (("old", "2026-11-20"), ("new", "2026-11-21"), ("abc", "2026-11-19"))
        ):
            machine = {"commit": commit, "date": date, "device": "a GPU"}
            fuzz_file = {"machine": machine, "cases": 10**at, "rows": 10**at, "seconds": 1.0}
            (folder / f"fuzz_{at}.json").write_text(json.dumps(fuzz_file))
        monkeypatch.setattr(readme_table, "RESULTS", folder)
        monkeypatch.setattr(readme_table, "PICTURE", tmp_path / "bench.png")
        return folder

    @staticmethod
    def changed(path: Path, change: Any) -> None:
        """Change a result file in place."""
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    def test_readme_has_one_small_table_and_few_sentences(self, folder: Path) -> None:
        block = readme_table.results()
        lines = block.splitlines()
        assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
        table = [line for line in lines if line.startswith("|")]
        assert len(table) == 2 + len(readme_table.SHAPES)
        assert {line.count(" | ") for line in table if not line.startswith("|---")} == {4}
        assert "| 131,072 x 64 | 4.0 | 8.0 | 8.0 | 8.0 |" in table
        assert sum(line.startswith("- ") for line in lines) <= 8
        assert "one a GPU (commit abc)" in block and "target" not in block

    def test_page_has_every_shape(self, folder: Path) -> None:
        page = readme_table.performance()
        assert all(len(line) <= 120 for line in page.splitlines() if not line.startswith("|"))
        assert "| 32,768 x 1 | 4.0 | 4.0 | 4.0 | 8.0 |" in page and "target" not in page
        assert "| 70,690 x 1 | 4.00 | 8.0 |" in page
        assert "random model" in page and "k-th value NaN" in page
        text = " ".join(page.split())
        assert "as the integrations call it, with `row_slot`, `state` and `out`;" in text
        assert '"no hint" is `path="no_hint"` and `out` alone.' in text

    def test_chunks_of_a_prefill_have_a_table(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            slow = next(
                key
                for key, cell in data["cells"].items()
                if (cell["group"], cell["rows"]) == ("prefill", "causal")
            )
            data["cells"][slow]["memory_us"] = 44.44
            later = {**data["runs"][0], "copy_bytes_per_second": 3.25e12}
            data["runs"].append({**later, "machine": {**later["machine"], "commit": "later"}})
            for its in data["results"]:
                if its["cell"] == slow:
                    its["run"] = 1
                    figures = {"prefill": 71.23, "no_hint": 1234.5, "vllm_prefill": 99.0}
                    its["cold_us"] = figures.get(its["impl"], 100.4)
                    its["exact"] = its["impl"] != "vllm_prefill"

        self.changed(folder / "bench.json", change)
        page = readme_table.performance()
        assert "| 8,192 x 8,192 | 71.2 | 100 | 1,234 | 100 | 100 | - | 100 | 100 | 44.4 |" in page
        for n, rows in PREFILL_LIMITS:
            assert any(line.startswith(f"| {rows:,} x {n:,} |") for line in page.splitlines())
        assert "| 2,048 x 32,768, trace synthetic-L20 | 8.0 |" in page
        text = " ".join(page.split())
        assert "**Prefill** (a GPU, commit abc, later): microseconds of `indexer_topk_prefill`" in text
        assert "at 3.25 TB/s, which copying 1 GiB reached in the same run" in text

    def test_memory_has_no_column_without_a_measured_bandwidth(self, folder: Path) -> None:
        assert '"memory"' not in readme_table.performance()

    def test_parts_without_results_are_left_out(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            gone = ("prefill", "v4", "v41", "trace", "engine", "scale", "wide_buffers")
            data["cells"] = {key: cell for key, cell in data["cells"].items() if cell["group"] not in gone}
            data["results"] = [its for its in data["results"] if its["cell"] in data["cells"]]
            for its in data["results"]:
                its.pop("worst_us", None)

        self.changed(folder / "bench.json", change)
        for path in folder.glob("*.json"):
            if path.name != "bench.json":
                path.unlink()
        page, block = readme_table.performance(), readme_table.results()
        words = (
            "**Prefill**",
            "DeepSeek-V4",
            "**Host time",
            "**Phases**",
            "Fuzzing",
            "Simulated",
            "Under load",
        )
        assert [word for word in words if word in page] == []
        assert "Inside vLLM" not in block and "Worst launch" not in block and "\n\n\n" not in page + block

    def test_a_figure_of_another_run_is_not_compared(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            data["runs"].append(data["runs"][0])
            for its in data["results"]:
                if its["impl"] == "flashinfer_deterministic":
                    its["run"] = 1

        assert "FlashInfer, deterministic 2.00 (2.00," in readme_table.results()
        self.changed(folder / "bench.json", change)
        block = readme_table.results()
        assert "| 131,072 x 64 | 4.0 | 8.0 | 8.0 |" in block  # and no column of FlashInfer's
        assert "FlashInfer, deterministic 2.00" not in " ".join(block.split())

    def test_a_file_of_several_kinds_of_gpu_is_refused(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def change(data: dict[str, Any]) -> None:
            machine = {**data["runs"][0]["machine"], "device": "another"}
            data["runs"].append({**data["runs"][0], "machine": machine})

        self.changed(folder / "bench.json", change)
        assert readme_table.main(["--check"]) == 1
        assert (
            "bench.json: wanted runs on one kind of GPU, got ['a GPU', 'another']" in capsys.readouterr().err
        )

    def test_a_missing_file_is_taken_from_another_gpu_whose_name_stands_beside_it(self, folder: Path) -> None:
        other = folder.parent / "h2"
        other.mkdir()
        assert "launches of 33 configurations beside" in " ".join(readme_table.performance().split())
        for name in ("tune.json", "stress.json"):
            (folder / name).rename(other / name)
        self.changed(
            other / "tune.json", lambda data: data["machine"].update(device="NVIDIA H2", commit="abc")
        )
        page = " ".join(readme_table.performance().split())
        assert "**Fewer CTAs per row** (NVIDIA H2, commit abc)" in page
        assert "configurations beside" not in page  # runs under load are those of the GPU that the pages show

    def test_figures_of_older_kernels_are_said_to_be_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quoted = {"a.json": ["new"], "b.json": ["old", "same"], "c.json": ["old"]}
        monkeypatch.setattr(provenance, "changed_since", lambda commit: commit != "new")
        codes = {None: "today", "same": "today", "old": "before"}
        monkeypatch.setattr(provenance, "machine_code_of", codes.get)
        assert provenance.older_kernels(quoted) == (
            "The kernels have been rewritten since, with the same machine code (host code may "
            "differ): same (`b.json`). "
            "The kernels have changed since they were measured: old (`b.json`, `c.json`)."
        )
        codes[None] = codes["same"] = codes["old"] = None  # type: ignore[assignment]
        assert "changed since they were measured: old (`b.json`, `c.json`); same" in provenance.older_kernels(
            quoted
        )
        monkeypatch.setattr(provenance, "changed_since", lambda commit: False)
        assert provenance.older_kernels(quoted) == ""

    @pytest.mark.parametrize(
        ("page", "files"),
        [
            ("results", ()),
            ("performance", ("bench", "fuzz_2", "host_time", "phase_timing", "stress_rewrite", "tune")),
            ("vllm", ("vllm_serve",)),
        ],
    )
    def test_every_quoted_file_says_whose_kernels_it_measured(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, page: str, files: tuple[str, ...]
    ) -> None:
        monkeypatch.setattr(provenance, "changed_since", lambda commit: True)
        monkeypatch.setattr(provenance, "machine_code_of", lambda commit: None)
        made = readme_table.vllm_figures(folder) if page == "vllm" else getattr(readme_table, page)()
        told = " ".join(made.split()).partition("The kernels have changed since they were measured:")[2]
        trials = sorted(folder.glob("vllm_trial_*.json"))
        files += tuple(path.stem for path in trials) if page == "vllm" else ()
        assert {name for name in files if f"{name}.json`" not in told} == set()
        assert "stress_ee90c38" not in told and "flashmla_order" not in told
        if page == "results":
            compared = {commit for path in trials for commit in commits_compared(path)}
            assert (
                ".json" not in told
                and compared
                and {it for it in {*compared, "abc"} if it not in told} == set()
            )

    @pytest.mark.parametrize(
        ("name", "change", "wanted"),
        [
            ("bench", lambda data: data["results"][0].update(exact=False), "exact results"),
            ("bench", lambda data: data["runs"][0]["sets_in_20_runs"].update(hinted=2), "one selection"),
            ("stress", lambda data: data["totals"].update(clean=False), "a clean run"),
            ("stress_chaos", lambda data: data["totals"].update(launches_with_delays=3), "delays in every"),
            ("stress_rewrite", lambda data: data.update(failure={"hang": True}), "no failure"),
            ("stress_rewrite", lambda data: data["results"][7].update(exact_after=False), "exact launches"),
            ("stress_ee90c38", lambda data: data["totals"].update(clean=True), "the faults of the older"),
            ("fuzz_2", lambda data: data.update(failure={"error": "Mismatch"}), "no mismatch"),
            ("simulated_decode", lambda data: data["sets"].update(different=1), "no different set"),
            ("flashmla_order", lambda data: data["failures"].append("fp8"), "no failures"),
            (
                "vllm_trial_full_8k",
                lambda data: data["engines"][0].update(failures=["8 x 8192: RuntimeError"]),
                "no failures",
            ),
        ],
    )
    def test_a_file_that_contradicts_the_words_is_refused(
        self, folder: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, wanted: str
    ) -> None:
        path = folder / f"{name}.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        assert readme_table.main(["--check"]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"{name}.json: wanted {wanted}")

    def test_words_follow_the_files(self, folder: Path) -> None:
        more = {
            "cases": 30,
            "paths_asked_for": {"auto": 9, "no_hint": 1},
            "prefill": {"cases": 12, "paths_asked_for": {"radix_rounds": 12}},
            "blocks": {"cases": 8},
            "beside": ["sms", "l1"],
        }
        self.changed(folder / "fuzz_2.json", lambda data: data.update(more))

        def change_bench(data: dict[str, Any]) -> None:
            for cell in data["cells"].values():
                if cell["group"] == "main":
                    cell["keep"] = 0.81
            for its in data["results"]:
                its["each_us"] = {"worst": 9.0, "launches": 500}
            data["runs"][0]["baselines"]["vllm"] = {"version": "vLLM 7.7.7: some_topk", "why_not": ""}

        self.changed(folder / "bench.json", change_bench)

        def change_decode(data: dict[str, Any]) -> None:
            data["setup"]["traces"] = ["smollm2_dsaidx_L01_32k", "smollm2_dsaidx_L10_32k"]
            data["step_us"] = {"off": 110.0, "on": 100.0}
            data["prepare_us"] = {"off": 11.0, "on": 22.0}
            data["prepare_moved_us"] = {"off": 20.0, "on": 50.0}

        self.changed(folder / "simulated_decode.json", change_decode)
        page, block = (
            " ".join(made.split()) for made in (readme_table.performance(), readme_table.results())
        )
        assert (
            "30 random cases, 10 of decode (`auto`, `no_hint`), 12 of prefill (`radix_rounds`), 8 of blocks; "
            "100 rows, beside 2 kinds of neighbour, no mismatch in 1 s" in page
        )
        assert "a correlation of 0.90 from step to step" in page
        assert "| worst launch of 500 |" in page and "slowest of 500 launches" in block
        assert "| vLLM 7.7.7 |" in block and "vLLM 0.33" not in block.partition("**Inside vLLM**")[0]
        assert "over two traces of SmolLM2 (L01, L10) in one" in page
        told = (
            "In one run each the host prepares it in 22 us instead of 11, changed batches in 50 instead of 20"
        )
        assert f"TensorRT-LLM's compiled op. {told}." in page
        assert f"saves 10 us of GPU time in a simulated step of 1 layer. {told} (" in block

    def test_host_time_is_the_hooks_own_where_the_file_has_it(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            del data["prepare_us"], data["prepare_moved_us"]
            data["hook_us"] = {
                kind: {"median": median, "p90": median + 4, "steps": 9}
                for kind, median in (("arrivals", 60.4), ("moved", 22.0), ("same", 3.0))
            }

        self.changed(folder / "simulated_decode.json", change)
        page, block = (
            " ".join(made.split()) for made in (readme_table.performance(), readme_table.results())
        )
        told = (
            "On the host the hook takes, in the median (90th percentile), 3 us (7) where the batch has "
            "not changed, 22 us (26) where the batch has moved rows and 60 us (64) where the batch has new "
            "requests"
        )
        assert f"compiled op. {told}." in page and f"{told} (" in block

    def test_eager_calls_are_said_to_lose_where_they_do(self, folder: Path) -> None:
        def change(times: dict[str, float]) -> str:
            results = [{"call": call, "us": us} for call, us in times.items()]
            self.changed(folder / "host_time.json", lambda data: data.update(results=results))
            return " ".join(readme_table.results().split())

        times = {"hinted": 9.0, "dispatcher": 8.0, "zero_": 1.0, "vllm": 8.0, "torch": 7.0}
        assert "(vLLM 8.0, torch.topk 7.0): slower than vLLM and torch.topk (" in change(times)
        assert "(vLLM 8.0, torch.topk 7.0): no slower (" in change(times | {"hinted": 7.0})

    def test_worst_launch_is_that_of_all_groups(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            (trace,) = (key for key, cell in data["cells"].items() if cell["group"] == "trace")
            for its in data["results"]:
                if its["cell"] == trace and its["impl"] == "hinted":
                    its["worst_us"] = 36.0

        self.changed(folder / "bench.json", change)
        block = " ".join(readme_table.results().split())
        assert "up to 4.50 times the mean launch without a hint: 36.0 us (trace synthetic-L20," in block

    def test_ratios_say_over_how_many_cells_and_how_many_are_wrong(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            some = [its for its in data["results"] if its["impl"] == "trtllm"]
            for its in some[:3]:
                its["exact"] = False
            some[3]["cold_us"] = 2.0

        before = re.search(
            r"TensorRT-LLM 2.00 \(2.00, (\d+) cells\)", " ".join(readme_table.results().split())
        )
        self.changed(folder / "bench.json", change)
        block = " ".join(readme_table.results().split())
        assert before is not None and f"(0.50, {int(before[1]) - 3} cells; wrong in 3)" in block
        assert "**Faster than this package** by more than 1 %: TensorRT-LLM at" in block

    def test_selections_of_all_runs_count(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            data["runs"].append(
                {**data["runs"][0], "sets_in_20_runs": {"hinted": 1, "flashinfer": 17, "vllm": "no file"}}
            )

        self.changed(folder / "bench.json", change)
        block = " ".join(readme_table.results().split())
        assert "this package 1, torch.topk 1, TensorRT-LLM 1, vLLM 1, FlashInfer `top_k` 17," in block

    def test_columns_of_hard_rows_name_their_shapes(self, folder: Path) -> None:
        (line,) = [
            each for each in readme_table.performance().splitlines() if each.startswith("| N x batch | 32")
        ]
        assert line.split(" | ")[1:5] == ["32,513 x 1", "70,690 x 1", "65,559 x 8", "131,072 x 1"]

    def test_commits_that_the_history_lacks_are_refused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if not provenance.has_history():
            pytest.skip("this clone has no whole history")
        data = json.loads((folder / "tune.json").read_text())
        data["machine"]["commit"] = "0ddba11"
        (folder / "tune.json").write_text(json.dumps(data))
        assert readme_table.main(["--check"]) == 1
        assert "commits: wanted ancestors of this one, got 0ddba11" in capsys.readouterr().err
        monkeypatch.setattr(provenance, "has_history", lambda: False)
        assert provenance.unknown_commits("0ddba11 0ddba12-dirty") == ["0ddba12-dirty"]

    def test_commits_in_a_text(self) -> None:
        text = "commit 8a60b90; 882 of 2,025 of 1,985,280 (`a.json`, ee90c38), 04c07f3, 568501f."
        assert provenance.COMMIT.findall(text) == ["8a60b90", "ee90c38", "04c07f3", "568501f"]

    def test_picture_is_drawn_with_the_figures(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        image = readme_table.PICTURE
        assert "it was not drawn from bench.json" in readme_table.picture(check=True) and not image.exists()
        find_spec = readme_table.importlib.util.find_spec
        monkeypatch.setattr(readme_table.importlib.util, "find_spec", lambda name: None)
        assert "wanted the package matplotlib" in readme_table.picture(check=False)
        monkeypatch.setattr(readme_table.importlib.util, "find_spec", find_spec)
        assert readme_table.picture(check=False) == "" and readme_table.picture(check=True) == ""
        assert picture.digest_in(image) == provenance.digest_of(folder / "bench.json")

    def test_versions_of_projects_that_were_not_there_do_not_count(self) -> None:
        runs = [
            {"vllm": {"version": "vLLM 0.33.0: a", "why_not": ""}},
            {
                "vllm": {"version": "vLLM 0.34.0: a", "why_not": "no file"},
                "trtllm": {"version": "TensorRT-LLM 1.2.1 op", "why_not": ""},
            },
        ]
        assert peers.versions(runs) == {
            "TensorRT-LLM": "TensorRT-LLM 1.2.1",
            "vLLM": "vLLM 0.33.0",
            "FlashInfer": "FlashInfer",
            "cuDNN frontend": "cuDNN frontend",
        }

    def test_machine_code_is_that_of_a_commit_with_the_same_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        git = ["git", "-C", str(tmp_path)]
        subprocess.run([*git, "init", "-q"], check=True)
        kernel = tmp_path / "cpp" / "kernels" / "a.cuh"
        kernel.parent.mkdir(parents=True)
        commits = []
        for text in ("one", "one", "two"):
            kernel.write_text(text)
            named = ["-c", "user.name=a", "-c", "user.email=a@b"]
            subprocess.run([*git, "add", "-A"], check=True)
            subprocess.run([*git, *named, "commit", "-qm", text, "--allow-empty"], check=True)
            done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
            commits.append(done.stdout.strip())
        recorded = tmp_path / "machine_code.json"
        builds = {commits[0]: "a", commits[2]: "b"}
        recorded.write_text(
            json.dumps(
                {
                    "format": provenance.RECORD_FORMAT,
                    "builds": [
                        {"commit": it, "machine_code": {"sm_90a": code}} for it, code in builds.items()
                    ],
                }
            )
        )
        monkeypatch.setattr(provenance, "ROOT", tmp_path)
        monkeypatch.setattr(provenance, "MACHINE_CODE", recorded)
        assert [provenance.machine_code_of(commit) for commit in [*commits, None]] == ["a", "a", "b", "b"]
        kernel.write_text("three")
        assert provenance.machine_code_of(None) is None
        assert provenance.machine_code_of("f" * 40) is None
        recorded.write_text(json.dumps({"builds": json.loads(recorded.read_text())["builds"]}))
        assert provenance.machine_code_of(commits[0]) is None  # a digest of another format

    def test_shapes_at_which_pdl_costs_time_are_named(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            cells = data["cells"].items()
            slow = next(key for key, cell in cells if (cell["n"], cell["batch"]) == (524288, 8))
            for its in data["results"]:
                if its["impl"] == "pdl":
                    its["cold_us"] = 4.4 if its["cell"] == slow else 3.0

        self.changed(folder / "bench.json", change)
        page = " ".join(readme_table.performance().split())
        assert "is slower at 524,288 x 8 (1.10 times)." in page

    def test_change_is_seen_by_git(self) -> None:
        # The first commit's kernels are not these; of a commit that nobody made nothing is known.
        git = ["git", "-C", str(ROOT), "rev-list", "--max-parents=0", "HEAD"]
        first = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()[0]
        assert provenance.changed_since(first)
        assert not provenance.changed_since("f" * 40)

    def test_runs_under_load_are_told_in_numbers(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            data["totals"] |= {"launches": 1234567}
            del data["results"][1:]

        self.changed(folder / "stress.json", change)
        shutil.copy(folder / "stress.json", folder / "stress_more.json")
        page, block = (
            " ".join(made.split()) for made in (readme_table.performance(), readme_table.results())
        )
        assert "2,469,134 launches of 1 configurations" in page
        assert "at one in 823,044." in block  # no fault in so many leaves a rate of 3 / 2,469,134
        results = json.loads((folder / "stress_rewrite.json").read_text())["results"]
        disturbed = sum(each["disturbed_launches"] for each in results)
        assert f"one of five arguments in seven ways, of which {disturbed:,} were seen" in page
        assert "120 wrong, 1,398 guard words overwritten" in page

    def test_phases_of_both_versions_are_shown_alike(self) -> None:
        older = readme_table.find("phase_timing.json")
        assert older is not None
        names = {"single": "small_row", "gvr": "paper_gvr"}
        results = [
            {**result, "kernel": names.get(result["path"], result["path"]), "path": None}
            for result in older["results"]
        ]
        for kernel, shown in readme_table.PHASES.items():
            assert kernel in phase_timing.PHASES
            both = (readme_table.phase_table(data, kernel, shown) for data in (older, {"results": results}))
            assert len({tuple(lines) for lines in both}) == 1

    def test_fuzzing_is_that_of_the_commit_or_of_the_newest(self, folder: Path) -> None:
        assert [run["cases"] for run in readme_table.fuzz_of("abc").values()] == [100]
        assert [run["cases"] for run in readme_table.fuzz_of("unknown").values()] == [10]

    def test_file_of_another_format_is_named(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "bench.json").write_text('{"format": "gvr_topk.bench_kernels/1"}')
        monkeypatch.setattr("sys.argv", ["readme_table.py", "--check"])
        assert readme_table.main() == 1
        assert "bench.json: wanted format" in capsys.readouterr().err

    def test_rows_in_wide_buffers_have_a_table(self) -> None:
        cells = [Cell("main", 8192, 8)]
        cells += [Cell("wide_buffers", 8192, 8, width=width) for width in (131072, 1048576)]
        runs = [
            (cell, result(cell, impl, us + at))
            for at, cell in enumerate(cells)
            for impl, us in (("hinted", 4.0), ("vllm", 5.5))
        ]
        table = readme_table.wide_table(index_of(*runs))
        assert table[-2] == "| 8,192 x 8 | 4.0 (5.5) | 5.0 (6.5) | 6.0 (7.5) |"
        # A shape that lacks a width is left out, and with it the table.
        assert readme_table.wide_table(index_of(*runs[:4])) == []

    def test_faster_implementations_are_named(self) -> None:
        cell, wide = Cell("main", 4096), Cell("wide_buffers", 4096, 8, width=131072)
        index = index_of(
            *((where, result(where, "hinted", 4.0)) for where in (cell, wide)),
            (cell, result(cell, "vllm", 2.0)),
            (wide, result(wide, "vllm", 3.2)),
            (wide, result(wide, "trtllm", 4.0)),
        )
        assert readme_table.faster_cells(index) == {
            "vllm": {"4,096 x 1": 2.0, "4,096 x 8 in 131,072 columns": 1.25}
        }


class TestBaselines:
    def test_missing_files_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        found = baselines.available(tmp_path)
        assert set(found) == set(BASELINES)
        assert not found["torch"].why_not
        assert "libtrtllm_kernel.so" in found["trtllm"].why_not
        assert "_C_stable_libtorch.abi3.so" in found["vllm"].why_not

    def test_library_that_is_none_says_what_the_loader_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        (tmp_path / "libtrtllm_kernel.so").write_bytes(b"no library")
        assert "libtrtllm_kernel.so" in baselines.available(tmp_path)["trtllm"].why_not

    def test_compressed_file_is_unpacked_where_no_other_user_can_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setattr(baselines, "_own_folder", functools.cache(baselines._own_folder.__wrapped__))
        (tmp_path / "in" / "deep").mkdir(parents=True)
        (tmp_path / "in" / "deep" / "some.so.xz").write_bytes(lzma.compress(b"content"))
        found = baselines.find_file(tmp_path / "in", "some.so")
        assert found.read_bytes() == b"content" and found == baselines.find_file(tmp_path / "in", "some.so")
        assert (tmp_path / "in") not in found.parents
        assert found.parent.stat().st_mode & 0o777 == 0o700
        assert baselines._own_folder.__wrapped__() != found.parent  # a name that nobody knows beforehand

    def test_deterministic_calls_of_flashinfer_never_take_cub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, tuple[Any, ...]]] = []

        class Module:
            def __getattr__(self, name: str) -> Any:
                return lambda *arguments: calls.append((name, arguments)) or 16

        monkeypatch.setattr(baselines, "_flashinfer_module", lambda folder: (None, Module()))
        monkeypatch.setattr(baselines, "_current_stream", lambda ffi: contextlib.nullcontext())
        chain = make_chain(Cell("main", 32768, 1, 16), device="cpu")
        for deterministic in (False, True):
            load = functools.partial(baselines._load_flashinfer_ragged, deterministic=deterministic)
            load("name", "version", Path()).prepare(chain).launch(0)
        (_, (sized, _), (name, arguments)) = calls[0], calls[1], calls[2]
        assert sized == "cub_topk_ragged_transform" and len(calls) == 3
        assert name == "radix_topk_ragged_transform"
        assert arguments[5:] == (16, True, baselines.FLASHINFER_SMALL_TIES, False, None)

    def test_cudnn_takes_the_kernel_of_the_next_power_of_two(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[str, tuple[Any, ...]]] = []

        class Module:
            def __getitem__(self, name: str) -> Any:
                if not name.endswith("_16"):
                    raise AttributeError(name)
                return lambda *arguments: calls.append((name, arguments))

        class Bindings:
            load_module = staticmethod(lambda path: Module())

        (tmp_path / "cudnn_topk.so").write_bytes(b"")
        monkeypatch.setattr(baselines, "_import_from", lambda name, folder: Bindings)
        monkeypatch.setattr(baselines, "_current_stream", lambda ffi: contextlib.nullcontext())
        baseline = baselines._load_cudnn("cudnn", "version", tmp_path)
        chain = make_chain(Cell("main", 5000, 2, 16), device="cpu")
        prepared = baseline.prepare(chain)
        prepared.launch(3)
        ((name, arguments),) = calls
        assert name == "indexer_topk_8192_16"
        assert arguments[0].data_ptr() == chain.logits[3].data_ptr()
        assert arguments[5].data_ptr() == prepared.results[3].data_ptr()
        assert arguments[2].shape == (2, 2, chain.logits.shape[2])
        with pytest.raises(baselines.BaselineError, match="compiled for other columns and k"):
            baseline.prepare(make_chain(Cell("main", 5000, 2, 8), device="cpu"))
        with pytest.raises(baselines.BaselineError, match="at most 148 rows, got 149"):
            baseline.prepare(make_chain(Cell("main", 64, 149, 16), device="cpu"))

    def test_a_shorter_list_of_groups_leaves_nothing_of_the_others(self) -> None:
        baseline = baselines.available()["torch"]
        found = bench_kernels.theirs(baseline)
        assert found.refuse(Cell("main", 4096)) == ""
        assert found.refuse(Cell("k", 8192, 1, 512)).startswith("measured in the groups main,")
        listed = {name for name in bench_kernels.MEASURED if name in BASELINES}
        assert {"vllm", "flashinfer_deterministic"} & listed == set()  # everywhere
        assert {group for groups in bench_kernels.MEASURED.values() for group in groups} <= set(GROUPS)

    def test_rows_for_operators_without_lengths_hide_what_lies_past_the_end(self) -> None:
        logits = torch.full((2, 1, 4), float("nan"))
        logits[:, :, :3] = 1.0
        hidden = baselines._full_rows(Chain(logits, torch.tensor([3], dtype=torch.int32), 2))
        assert hidden[0, 0].tolist() == [1.0, 1.0, 1.0, float("-inf")]

    def test_flashinfer_chooses_as_it_does_inside_a_graph(self) -> None:
        assert baselines.flashinfer_takes_cub(64, 16384, torch.float32)
        assert not baselines.flashinfer_takes_cub(128, 16384, torch.float32)
        assert not baselines.flashinfer_ragged_takes_cub(64, 16384, torch.float32)
        assert baselines.flashinfer_ragged_takes_cub(64, 32768, torch.float32)
        assert not baselines.flashinfer_ragged_takes_cub(128, 65536, torch.float16)
        assert not baselines.flashinfer_ragged_takes_cub(512, 1 << 20, torch.float32)


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


class TestPhaseTiming:
    phases = ("a", "b")

    def test_plain_launches_give_medians_and_others_a_total(self) -> None:
        clocks = np.zeros((4, PHASE_STAMPS), dtype=np.int64)
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
        assert all(len(phases) < PHASE_STAMPS for phases in phase_timing.PHASES.values())
        assert {len(figures) for figures in phase_timing.PAPER.values()} == {
            len(phase_timing.PHASES["paper_gvr"])
        }


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
