"""What the kernel benchmark measures: cells, chains of rows, and walks over them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from bench_data import CAUSAL
from bench_data import short_chains as short_chains  # a fixture for all

from eval.bench import bench_cases, kernel_timing
from eval.bench.bench_cases import (
    BATCHES,
    LENGTHS,
    MASKS,
    Cell,
    EngineRows,
    Sources,
    all_cells,
    make_chain,
)
from eval.bench.bench_report import SHAPES
from eval.bench.kernel_timing import POISON, Chain, ChainRun, Prepared, chain_of
from eval.bench.our_kernels import Variant, prepare_ours
from gvr_topk.constants import STATE_UNKNOWN
from gvr_topk.evaluation.synthetic import LayerGenerator


class TestCells:
    def test_main_sweep_covers_every_length_and_batch(self) -> None:
        main = {(cell.n, cell.batch) for cell in all_cells() if cell.group == "main"}
        assert main == {(n, batch) for n in LENGTHS for batch in BATCHES}
        assert set(SHAPES) <= main

    def test_rows_in_wide_buffers_are_those_of_narrow_ones(self) -> None:
        cells = [cell for cell in all_cells() if cell.group == "wide_buffers"]
        assert {cell.width for cell in cells} == {0, 131072, 1048576}
        assert all(cell.key.endswith(f" in{cell.width}") for cell in cells if cell.width)
        own, wide = (make_chain(Cell("wide_buffers", 300, k=16, width=at), device="cpu") for at in (0, 1024))
        assert own.logits.shape[2] == 304 and wide.logits.shape[2] == 1024
        assert torch.equal(own.logits[..., :300], wide.logits[..., :300])
        assert bool(wide.logits[..., 300:].isnan().all()) and torch.equal(own.lengths, wide.lengths)


def chain_for(rows: str = "gauss", n: int = 300, batch: int = 2, **more: Any) -> Chain:
    sources = Sources(
        [LayerGenerator(20, n - 9, 10)], [EngineRows("e", tuple(torch.randn(4, n) for _ in range(2)))]
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

    def test_cold_chains_outgrow_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_timing, "MIN_STEPS", 20)
        monkeypatch.setattr(kernel_timing, "MAX_STEPS", 4000)
        monkeypatch.setattr(kernel_timing, "l2_bytes", lambda device: 60 << 20)
        assert kernel_timing.steps_for(131072 * 4, "cuda") * 131072 * 4 > 4 * (60 << 20)
        assert kernel_timing.steps_for(8192 * 4, "cuda") == 4000
        assert kernel_timing.steps_for(1 << 30, "cuda") == 20


class TestChainRun:
    def test_every_replay_begins_with_the_state_of_the_step_before(self) -> None:
        chain = chain_for()
        prepared = prepare_ours(chain, Variant(indices=True))
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

    def test_rows_of_a_trace_are_repeated_in_their_order(self) -> None:
        source = LayerGenerator(20, 100, 10)
        cell = Cell("prefill", 109, 25, k=16, rows="causal:synthetic-L20")
        chain = make_chain(cell, Sources([source]), device="cpu")
        assert chain.lengths.tolist() == [*range(100, 110), *range(100, 110), *range(100, 105)]
        for row in (0, 9, 10, 24):
            scores = source.scores(row % 10)
            assert np.array_equal(chain.logits[0, row, : len(scores)].numpy(), scores)
            assert bool(chain.logits[0, row, len(scores) :].isnan().all())

    def test_traffic_is_that_of_windows_and_items(self) -> None:
        lengths = torch.tensor([2, 5, 6], dtype=torch.int32)
        chain = Chain(torch.zeros(1, 3, 8), lengths, 4, lead=0, fresh=1)
        traffic = bench_cases.memory_traffic(chain, 2e9)
        assert traffic["bytes_read"] == 4 * (5 + 6) + 3 * 2 * 4
        assert traffic["bytes_written"] == 4 * 3 * 4
        assert traffic["memory_us"] == round(1e6 * (68 + 48) / 2e9, 4)
        assert "memory_us" not in bench_cases.memory_traffic(chain)  # of an unknown memory
