"""What the kernel benchmark measures: cells, chains of rows, and walks over them."""

import dataclasses
import itertools
import shutil
from pathlib import Path
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
    Cell,
    EngineRows,
    Sources,
    all_cells,
    load_sources,
    make_chain,
)
from eval.bench.bench_report import SHAPES
from eval.bench.kernel_timing import GRAPHS, POISON, Chain, ChainRun, Prepared, chain_of
from eval.bench.our_kernels import Variant, prepare_ours
from gvr_topk.constants import STATE_UNKNOWN
from gvr_topk.evaluation.synthetic import LayerGenerator
from gvr_topk.evaluation.trace import TraceError, shipped_trace


class TestCells:
    def test_main_sweep_covers_every_length_and_batch(self) -> None:
        main = {(cell.n, cell.batch) for cell in all_cells() if cell.group == "main"}
        assert main == {(n, batch) for n in LENGTHS for batch in BATCHES}
        assert set(SHAPES) <= main

    def test_a_folder_has_traces_and_engines_rows_and_a_damaged_file_is_refused(self, tmp_path: Path) -> None:
        shipped = shipped_trace()
        assert shipped.path is not None
        for name in (shipped.name, "mine"):
            shutil.copy(shipped.path, tmp_path / f"{name}.npz")
        np.savez(tmp_path / "e.npz", **{f"{layer}.logits": np.ones((3, 5), np.float32) for layer in (0, 1)})
        np.savez(tmp_path / "other.npz", x=np.zeros(3))
        found = load_sources(tmp_path)
        assert [trace.name for trace in found.traces] == [shipped.name, "mine"]
        assert [(its.name, its.batch, its.length, len(its.layers)) for its in found.engines] == [
            ("e", 3, 5, 2)
        ]
        (tmp_path / "cut.npz").write_bytes(shipped.path.read_bytes()[:5000])
        with pytest.raises(TraceError, match=r"cut\.npz: wanted an \.npz file"):
            load_sources(tmp_path)


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
        assert order == 3 * GRAPHS * list(chain.timed)
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

    def test_each_row_may_have_a_scale_of_its_own(self) -> None:
        chain = make_chain(dataclasses.replace(CAUSAL, rows="causal_scale"), device="cpu")
        plain = make_chain(CAUSAL, device="cpu")
        factors = (chain.logits[0] / plain.logits[0])[:, :101]
        assert torch.allclose(factors, factors[:, :1].expand_as(factors))
        octaves = factors[:, 0].log2()
        assert octaves.min() < -2 and octaves.max() > 2 and octaves.abs().max() <= bench_cases.OCTAVES

    def test_traffic_is_that_of_windows_and_items(self) -> None:
        lengths = torch.tensor([2, 5, 6], dtype=torch.int32)
        chain = Chain(torch.zeros(1, 3, 8), lengths, 4, lead=0, fresh=1)
        traffic = bench_cases.memory_traffic(chain, 2e9)
        assert traffic["bytes_read"] == 4 * (5 + 6) + 3 * 2 * 4
        assert traffic["bytes_written"] == 4 * 3 * 4
        assert traffic["memory_us"] == round(1e6 * (68 + 48) / 2e9, 4)
        assert "memory_us" not in bench_cases.memory_traffic(chain)  # of an unknown memory
