"""The SGLang plugin on fakes of its signatures: exact results, state by request, and ways to stay off."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import sglang_base as base
import torch
from edited_tree import forget
from sampler_setup import fail
from sglang_base import CALLS, ForwardBatch, ForwardMode, HookRegistry, ReqToTokenPool
from sglang_setup import PACKAGES, VERSION, fake_sglang, logged
from torch import Tensor

from gvr_topk import TopkState, policy
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations._kit.engine import Engine
from gvr_topk.integrations.sglang import plugin, register, row_state, transforms
from gvr_topk.library import LibraryStatus

K = 16
PAGE = 8
WIDTH = 96
ASKED = "GVR_TOPK_SGLANG"
TREES = ("sglang_dsa", "sglang_nsa")
DISPATCH = {
    "sglang_dsa": "sglang.srt.layers.attention.dsa.dsa_topk_backend",
    "sglang_nsa": "sglang.srt.layers.attention.nsa_backend",
}
INDEXER = {
    "sglang_dsa": "sglang.srt.layers.attention.dsa.dsa_indexer",
    "sglang_nsa": "sglang.srt.layers.attention.nsa.nsa_indexer",
}
LENGTHS = [WIDTH, 0, 5, K, K + 1, 70, -3]
"""A full row, empty ones, rows shorter than k, of k, and longer."""


class SGLang:
    """One fake tree on ``sys.path``."""

    def __init__(self, tree: str) -> None:
        self.tree = tree
        self.dispatch: Any = importlib.import_module(DISPATCH[tree])
        self.kernel: ModuleType = importlib.import_module("sgl_kernel")
        self.pool = ReqToTokenPool(31, WIDTH)

    @property
    def v2(self) -> Any:
        return importlib.import_module("sglang.kernels.ops.attention.dsv4.topk")

    def load(self) -> None:
        base.load_plugins([register])

    def metadata(self, method: str, lengths: Tensor, **options: Any) -> Any:
        named = {
            name: options.pop(name, None) for name in ("page_table_1", "real_page_table", "cu_seqlens_q")
        }
        offsets = options.pop("offsets", None)
        fields = SimpleNamespace(**named, seqlens_expanded=lengths, topk_indices_offset=offsets)
        return self.dispatch.Metadata(base.TopkTransformMethod[method], fields, **options)

    def indexer(self) -> Any:
        return importlib.import_module(INDEXER[self.tree]).Indexer(K)

    def batch(self, indices: list[int], **options: Any) -> ForwardBatch:
        return ForwardBatch(indices, pool=self.pool, **options)


@pytest.fixture(params=TREES)
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLang]:
    with fake_sglang(request.param, monkeypatch):
        yield SGLang(request.param)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLang]:
    with fake_sglang("sglang_dsa", monkeypatch):
        yield SGLang("sglang_dsa")


@pytest.fixture
def serving(sglang: SGLang) -> Iterator[SGLang]:
    """Each tree with the plugin, whose top-k alone may be called."""
    sglang.load()
    yield sglang
    assert not CALLS


@pytest.fixture
def newer_serving(newer: SGLang) -> Iterator[SGLang]:
    newer.load()
    yield newer
    assert not CALLS


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    return logged(caplog)


def scores(rows: int, kind: str = "random", width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 31 + width)
    result = torch.randn(rows, width, generator=generator)
    if kind == "ties":
        return result.round()
    if kind == "special":
        result[:, ::5] = float("-inf")
        result[:, 3::7] = float("inf")
        result[:, 1::11] = float("nan")
        result[:, 2::13] = -0.0
    return result


def lengths_of(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table_of(rows: int, pages: int) -> Tensor:
    """Pages in a random order, all different."""
    generator = torch.Generator().manual_seed(7)
    return torch.randperm(rows * pages, generator=generator).view(rows, pages).to(torch.int32)


def slots_of(positions: Tensor, table: Tensor, page_size: int) -> Tensor:
    """What the contract of a page table says, by a loop that shares nothing with the op."""
    result = torch.full_like(positions, -1)
    for row, chosen in enumerate(positions.tolist()):
        for column, position in enumerate(chosen):
            page = position // page_size
            if position >= 0 and page < table.shape[1] and table[row, page] >= 0:
                result[row, column] = table[row, page] * page_size + position % page_size
    return result


def shifted(positions: Tensor, offsets: Tensor) -> Tensor:
    return torch.where(positions < 0, -1, positions + offsets[:, None]).to(torch.int32)


KINDS = pytest.mark.parametrize("kind", ["random", "ties", "special"])


@KINDS
class TestExact:
    @pytest.fixture
    def rows(self, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, lengths and the positions to be selected."""
        score, lengths = scores(len(LENGTHS), kind), lengths_of(LENGTHS)
        return score, lengths, sorted_topk(score, lengths, K)

    def test_paged_by_position(self, serving: SGLang, rows: Any) -> None:
        score, lengths, positions = rows
        table = table_of(len(LENGTHS), WIDTH)
        options = {"v2": False} if serving.tree == "sglang_dsa" else {}
        got = serving.metadata("PAGED", lengths, page_table_1=table, **options).topk_transform(score, K)
        assert torch.equal(got, slots_of(positions, table, 1))

    def test_paged_by_page(self, newer_serving: SGLang, rows: Any) -> None:
        score, lengths, positions = rows
        table = table_of(len(LENGTHS), WIDTH // PAGE)
        metadata = newer_serving.metadata("PAGED", lengths, real_page_table=table, page_size=PAGE)
        assert torch.equal(metadata.topk_transform(score, K), slots_of(positions, table, PAGE))


class TestPagedV2:
    def test_positions_and_slots(self, newer_serving: SGLang) -> None:
        score, lengths = scores(3), lengths_of([WIDTH, 4, 40])
        table = table_of(3, WIDTH // PAGE)
        slots, raw = (torch.full((3, K), 99, dtype=torch.int32) for _ in range(2))
        newer_serving.v2.topk_transform_512_v2(score, lengths, table, slots, PAGE, None, raw)
        assert torch.equal(raw, sorted_topk(score, lengths, K))
        assert torch.equal(slots, slots_of(raw, table, PAGE))

    def test_without_a_table(self, newer_serving: SGLang) -> None:
        score, lengths = scores(2), lengths_of([WIDTH, 40])
        out, raw = (torch.full((2, K), 99, dtype=torch.int32) for _ in range(2))
        newer_serving.v2.topk_transform_512_v2(score, lengths, None, out, PAGE, None, out_raw_indices=raw)
        assert torch.equal(out, sorted_topk(score, lengths, K))
        assert torch.equal(raw, out)
        newer_serving.v2.topk_transform_512_v2(score, lengths, None, out.zero_(), PAGE, None)
        assert torch.equal(out, raw)

    def test_the_newest_name(self, newer: SGLang) -> None:
        module = newer.v2
        module.topk_transform_paged_v2 = module.topk_transform_512_v2
        del module.topk_transform_512_v2
        newer.load()
        score, lengths, table = scores(2), lengths_of([WIDTH, 40]), table_of(2, WIDTH // PAGE)
        out = torch.zeros(2, K, dtype=torch.int32)
        module.topk_transform_paged_v2(score, lengths, table, out, PAGE, None)
        assert torch.equal(out, slots_of(sorted_topk(score, lengths, K), table, PAGE))
        assert not CALLS


def test_holes_and_short_tables(newer_serving: SGLang) -> None:
    """A page that the table holds as -1, or not at all, gives -1 and disturbs nothing else."""
    score, lengths = scores(2), lengths_of([WIDTH, WIDTH])
    table = table_of(2, WIDTH // PAGE)
    table[0, 3] = table[1, 0] = -1
    expected = slots_of(sorted_topk(score, lengths, K), table, PAGE)
    assert (expected < 0).any()
    metadata = newer_serving.metadata("PAGED", lengths, real_page_table=table, page_size=PAGE)
    assert torch.equal(metadata.topk_transform(score, K), expected)
    narrow = newer_serving.metadata("PAGED", lengths, page_table_1=table_of(2, WIDTH // 2), v2=False)
    narrow.attn_metadata.real_page_table = table
    expected = slots_of(sorted_topk(score, lengths, K), narrow.attn_metadata.page_table_1, 1)
    assert torch.equal(narrow.topk_transform(score, K), expected)


def test_no_rows(serving: SGLang) -> None:
    none, score = lengths_of([]), torch.empty(0, WIDTH)
    assert serving.metadata("PAGED", none, fuse=False).topk_transform(score, K).shape == (0, K)
    assert serving.metadata("RAGGED", none, offsets=none).topk_transform(score, K, ks=none).shape == (0, K)


def windows() -> tuple[Tensor, Tensor, Tensor]:
    """Starts, lengths and requests of rows of three prompts, whose keys lie one behind the other.

    Some are empty, short, of k, long, or end with the scores; around each of them other scores stand.
    """
    starts = lengths_of([0, 0, 0, 30, 30, 30, 60, 60])
    lengths = lengths_of([1, K, 30, 0, K + 1, 29, 35, WIDTH - 60])
    return starts, lengths, lengths_of([0, 0, 0, 1, 1, 1, 2, 2])


ENDS = [0, 3, 6, 8]
"""Where the rows of each of these prompts begin, and the last one ends."""


def window_positions(score: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """What is in the windows, by a loop over rows that shares nothing with the ops."""
    rows = [
        sorted_topk(score[row : row + 1, start:], lengths[row : row + 1], K)
        for row, start in enumerate(starts.tolist())
    ]
    return torch.cat(rows)


@KINDS
@pytest.mark.parametrize("inside", [False, True])
def test_positions_and_ragged(serving: SGLang, kind: str, inside: bool) -> None:
    """Of rows that begin with the scores, and of such that begin inside."""
    starts, lengths = windows()[:2] if inside else (None, lengths_of(LENGTHS))
    score = scores(len(lengths), kind)
    positions = window_positions(score, torch.zeros_like(lengths) if starts is None else starts, lengths)
    got = serving.metadata("PAGED", lengths, fuse=False).topk_transform(score, K, ks=starts)
    assert torch.equal(got, positions)
    offsets = 1000 * torch.arange(len(lengths), 0, -1, dtype=torch.int32)
    got = serving.metadata("RAGGED", lengths, offsets=offsets).topk_transform(score, K, ks=starts)
    assert got.dtype == torch.int32 and torch.equal(got, shifted(positions, offsets))


@KINDS
class TestPrefill:
    """Rows that begin inside the scores, as prompts have them."""

    @pytest.fixture
    def rows(self, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Scores, starts, lengths, requests and the positions to be selected."""
        starts, lengths, request = windows()
        score = scores(len(starts), kind)
        return score, starts, lengths, request, window_positions(score, starts, lengths)

    def test_ragged_v2(self, newer_serving: SGLang, rows: Any) -> None:
        score, starts, lengths, _, positions = rows
        out = torch.zeros(len(starts), K, dtype=torch.int32)
        options = {"out_offsets": starts, "out_indices": out, "row_starts": starts}
        newer_serving.v2.topk_transform_ragged_v2(score, lengths, **options)
        assert torch.equal(out, shifted(positions, starts))

    def test_paged(self, serving: SGLang, rows: Any) -> None:
        """The rows of a prompt share a row of the table, also where each prompt has but one."""
        score, starts, lengths, request, positions = rows
        for some, ends, owner in (
            (list(range(8)), ENDS, request),
            ([1, 4, 7], [0, 1, 2, 3], lengths_of([0, 1, 2])),
        ):
            table = table_of(3, WIDTH)
            table[1, 5] = -1
            tables = {"page_table_1": table, "cu_seqlens_q": lengths_of(ends)}
            metadata = serving.metadata("PAGED", lengths[some], **tables)
            got = metadata.topk_transform(score[some], K, ks=starts[some])
            assert torch.equal(got, slots_of(positions[some], table[owner.long()], 1))

    def test_rows_that_share_a_table_row(self, serving: SGLang, kind: str) -> None:
        """Several drafts of a request, as in target verification: their rows begin at the first column."""
        lengths = lengths_of([30, 31, 40])
        score, table = scores(3, kind), table_of(2, WIDTH)
        tables = {"page_table_1": table, "real_page_table": table, "cu_seqlens_q": lengths_of([0, 2, 3])}
        got = serving.metadata("PAGED", lengths, **tables).topk_transform(score, K)
        assert torch.equal(got, slots_of(sorted_topk(score, lengths, K), table[[0, 0, 1]], 1))


def test_rows_behind_the_last_request_are_empty(serving: SGLang) -> None:
    """A captured graph may have more rows than there are tokens, and requests without a row."""
    score, lengths, table = scores(5), lengths_of([40] * 5), table_of(3, WIDTH)
    tables = {"page_table_1": table, "real_page_table": table, "cu_seqlens_q": lengths_of([0, 2, 2, 4])}
    metadata = serving.metadata("PAGED", lengths, **tables)
    got = metadata.topk_transform(score, K, ks=torch.zeros_like(lengths))
    expected = slots_of(sorted_topk(score, lengths, K), table[[0, 0, 2, 2, 0]], 1)
    expected[4] = -1
    assert torch.equal(got, expected)


class TestLeftToSGLang:
    """What the ops cannot serve is SGLang's own result, with one line for each reason."""

    def test_prefill_without_a_kernel(self, sglang: SGLang, lines: Any, monkeypatch: Any) -> None:
        reason = "compute capability 8.0, wanted 9.0 or later"
        monkeypatch.setattr(transforms, "_check_device", Mock(side_effect=transforms.NotServedError(reason)))
        sglang.load()
        starts, lengths, _ = windows()
        score = scores(len(starts))
        metadata = sglang.metadata("RAGGED", lengths, offsets=starts)
        for _ in range(3):
            got = metadata.topk_transform(score, K, ks=starts)
        assert torch.equal(got, shifted(base.chosen(score, lengths, K, starts), starts))
        assert CALLS["fast_topk_transform_ragged_fused"] == 3
        assert lines("left to SGLang") == [f"fast_topk_transform_ragged_fused left to SGLang: {reason}"]

    def test_scores_that_the_ops_do_not_take(self, sglang: SGLang, lines: Any) -> None:
        """And nothing is switched off by them."""
        sglang.load()
        score, lengths = scores(2), lengths_of([9, WIDTH // 2])
        for other in (score.double(), score[:, ::2], score):
            got = sglang.kernel.fast_topk_v2(other, lengths, K)
            assert torch.equal(got.sort(1).values, base.chosen(other, lengths, K, None).sort(1).values)
        assert CALLS == {"fast_topk_v2": 2}
        first, second = lines("left to SGLang")
        assert first == "fast_topk_v2 left to SGLang: scores of torch.float64 with strides (96, 1)"
        assert second == "fast_topk_v2 left to SGLang: scores of torch.float32 with strides (96, 2)"

    def test_memory_that_ends_is_told_once(self, sglang: SGLang, lines: Any, monkeypatch: Any) -> None:
        """Although each error names other numbers of bytes."""
        errors = (torch.OutOfMemoryError(f"{size} MiB are free") for size in range(9))
        monkeypatch.setattr(transforms, "indexer_topk_decode", Mock(side_effect=errors))
        sglang.load()
        for _ in range(3):
            sglang.kernel.fast_topk_v2(scores(2), lengths_of([9, WIDTH]), K)
        assert CALLS == {"fast_topk_v2": 3}
        assert lines("memory ends") == ["fast_topk_v2 left to SGLang where memory ends"]

    def test_an_error_switches_one_function_off(self, sglang: SGLang, lines: Any, monkeypatch: Any) -> None:
        sglang.load()
        score, lengths = scores(2), lengths_of([9, WIDTH])
        monkeypatch.setattr(transforms, "indexer_topk_decode", fail)
        for _ in range(2):
            got = sglang.kernel.fast_topk_v2(score, lengths, K)
            assert torch.equal(got, base.chosen(score, lengths, K, None))
            monkeypatch.undo()
        table = table_of(2, WIDTH)
        sglang.kernel.fast_topk_transform_fused(score, lengths, table, None, K)
        assert CALLS == {"fast_topk_v2": 2}
        error = "fast_topk_v2: RuntimeError: no room for this launch"
        told = f"fell back: {error}. SGLang's own fast_topk_v2 top-k serves from now on"
        assert lines("fell back") == [told]

    @pytest.mark.parametrize("arch", [75, 80, 89, 90, 100, 110, 120, 130])
    def test_compute_capability(self, monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
        monkeypatch.setattr(policy, "library_status", lambda: LibraryStatus(True, "", ""))
        monkeypatch.setattr(policy, "gpu_arch", lambda device: arch)
        monkeypatch.setattr(policy, "architectures", lambda **_: "90a 100f 120f")
        check = transforms._check_device.__wrapped__  # without the answer for another capability
        if arch in (90, 100, 120):
            check(torch.device("cuda", 8))
            return
        with pytest.raises(transforms.NotServedError, match=rf"120f\), got compute capability {arch / 10}$"):
            check(torch.device("cuda", 8))


def last_of_ties(score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None) -> Tensor:
    """As the fakes' `chosen`, but of equal scores the last ones."""
    ends = lengths if row_starts is None else row_starts + lengths
    mirrored = base.chosen(score.flip(1), lengths, topk, score.shape[1] - ends)
    return torch.where(mirrored < 0, -1, lengths[:, None] - 1 - mirrored)


class TestVerified:
    """``GVR_TOPK_VERIFY`` on every hooked function, with results that are no positions and other ties."""

    @pytest.fixture
    def run(self, newer: SGLang, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Call every function with rows full of ties; it returns the results in the order of the hooks."""
        monkeypatch.setenv("GVR_TOPK_VERIFY", "2")
        for module in (newer.kernel, newer.v2):
            monkeypatch.setattr(module, "chosen", last_of_ties)

        def run() -> list[Tensor]:
            rows = len(LENGTHS)
            score, lengths = scores(rows, "ties"), lengths_of(LENGTHS)
            starts = lengths_of([3, 50, 0, 9, 0, 20, 0])
            table, pages = table_of(rows, WIDTH), table_of(rows, WIDTH // PAGE)
            windows = torch.minimum(lengths, WIDTH - starts)
            shared = lengths_of([0, 2, 3, 5, rows - 1])
            windows[-1] = 40  # of a row behind the last request, where there are requests
            ends, offsets = lengths_of(list(range(rows + 1))), 1000 * torch.arange(rows, dtype=torch.int32)
            v2, ragged_v2, raw = (torch.zeros(rows, K, dtype=torch.int32) for _ in range(3))
            kernel = newer.kernel
            results = [
                kernel.fast_topk_v2(score, windows, K, row_starts=starts),
                kernel.fast_topk_transform_fused(score, windows, table[:4], shared, K, row_starts=starts),
                kernel.fast_topk_transform_ragged_fused(score, lengths, offsets, K),
                v2,
                ragged_v2,
                kernel.fast_topk_v2(score, lengths, K),
                kernel.fast_topk_transform_fused(score, lengths, table, ends, K),
                raw,
            ]
            newer.v2.topk_transform_512_v2(score, lengths, pages, v2, PAGE, None, raw)
            newer.v2.topk_transform_ragged_v2(score, lengths, out_offsets=offsets, out_indices=ragged_v2)
            return results

        return run

    def test_and_served(self, newer: SGLang, run: Any, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        newer.load()
        served = [run(), run(), run()]
        calls = dict(CALLS)
        monkeypatch.delenv("GVR_TOPK_VERIFY")
        HookRegistry.reset()
        forget(PACKAGES)
        newer.__init__(newer.tree)  # type: ignore[misc]
        newer.load()
        for results in served:
            for got, wanted in zip(results, run(), strict=True):
                assert torch.equal(got, wanted)
        assert set(calls.values()) == {2} and len(calls) == 5
        assert len(lines("verified 2 calls of ")) == 5 and calls == CALLS

    @pytest.mark.parametrize("op", ["indexer_topk_decode", "indexer_topk_prefill"])
    def test_a_wrong_op_is_noticed(
        self, newer: SGLang, run: Any, lines: Any, monkeypatch: Any, op: str
    ) -> None:
        real = getattr(transforms, op)
        monkeypatch.setattr(transforms, op, lambda *args, **options: real(*args, **options).fill_(0))
        newer.load()
        for _ in range(2):
            run()
        assert len(lines("Differs: row ")) == (3 if op == "indexer_topk_decode" else 4)
        assert all("fell back" in line for line in lines("Differs: row "))


class TestState:
    """Decode rows have the state of their request; other rows have none."""

    @pytest.fixture
    def states(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[TopkState | None, list[int] | None]]:
        """State and slots of each call of the op."""
        seen: list[tuple[TopkState | None, list[int] | None]] = []
        real = transforms.indexer_topk_decode

        def noting(*args: Any, **options: Any) -> Tensor:
            slots = options["row_slot"]
            seen.append((options["state"], None if slots is None else slots.tolist()))
            return real(*args, **options)

        monkeypatch.setattr(transforms, "indexer_topk_decode", noting)
        return seen

    def step(self, sglang: SGLang, indexer: Any, batch: Any, score: Tensor) -> Tensor:
        rows = len(score)
        options = {"v2": False} if sglang.tree == "sglang_dsa" else {}
        tables = {"page_table_1": table_of(rows, WIDTH), **options}
        metadata = sglang.metadata("PAGED", lengths_of([WIDTH] * rows), **tables)
        return indexer._get_topk_paged(batch, 0, score, None, metadata)

    def test_by_request(self, sglang: SGLang, states: Any) -> None:
        sglang.load()
        first, second = sglang.indexer(), sglang.indexer()
        batch = sglang.batch([3, 0, 9])
        for indexer in (first, second):
            self.step(sglang, indexer, batch, scores(3))
        (state, slots), (other, other_slots) = states
        assert slots == other_slots == [2, -1, 8]  # request 0 is padding
        assert state is not other
        assert state.slots == sglang.pool.size + 1
        kept = state.words.clone()
        assert (kept[[2, 8], 0] >= 0).all()
        assert (kept[[0, 1, 3], 0] < 0).all()
        # The same requests in other rows of another batch find what they left.
        self.step(sglang, first, sglang.batch([9, 3, 4]), scores(3)[[2, 0, 1]])
        assert states[-1][0] is state
        assert states[-1][1] == [8, 2, 3]
        assert torch.equal(state.words[[2, 8]], kept[[2, 8]])

    def test_slots_are_computed_once_for_each_pass(
        self, sglang: SGLang, states: Any, monkeypatch: Any
    ) -> None:
        """A batch whose indices change in place, as those of a graph do, is read again in each pass."""
        sglang.load()
        passes = []
        real = row_state._Pass
        monkeypatch.setattr(row_state, "_Pass", lambda *args: passes.append(1) or real(*args))
        layers, batch = [sglang.indexer() for _ in range(3)], sglang.batch([1, 2])
        for indices in ([1, 2], [5, 6]):
            batch.req_pool_indices.copy_(torch.tensor(indices))
            for layer in layers:
                self.step(sglang, layer, batch, scores(2))
        assert [slots for _, slots in states] == [[0, 1]] * 3 + [[4, 5]] * 3
        assert len(passes) == 2

    def test_none_for_other_rows(self, sglang: SGLang, states: Any) -> None:
        sglang.load()
        indexer = sglang.indexer()
        for batch, rows in (
            (sglang.batch([1, 2], forward_mode=ForwardMode.EXTEND), 2),
            (sglang.batch([1, 2], forward_mode=ForwardMode.TARGET_VERIFY), 4),
            (sglang.batch([1, 2], spec_info=object()), 2),
            (sglang.batch([1, 2]), 4),
        ):
            self.step(sglang, indexer, batch, scores(rows))
        assert states == [(None, None)] * 4

    def test_none_outside_of_an_indexer(self, sglang: SGLang, states: Any) -> None:
        sglang.load()
        indexer = sglang.indexer()
        self.step(sglang, indexer, sglang.batch([1]), scores(1))
        sglang.kernel.fast_topk_v2(scores(1), lengths_of([WIDTH]), K)
        assert [state is None for state, _ in states] == [False, True]

    def test_pool_of_the_forward_context(self, newer: SGLang, states: Any) -> None:
        context: Any = importlib.import_module(row_state.FORWARD_CONTEXT)
        context.POOL = newer.pool
        newer.load()
        self.step(newer, newer.indexer(), ForwardBatch([4]), scores(1))
        state, slots = states[0]
        assert state.slots == newer.pool.size + 1
        assert slots == [3]

    def test_none_where_the_pool_is_not_found(self, newer: SGLang, states: Any, lines: Any) -> None:
        importlib.import_module(row_state.FORWARD_CONTEXT)
        newer.load()
        for _ in range(2):
            self.step(newer, newer.indexer(), ForwardBatch([4]), scores(1))
        assert states == [(None, None)] * 2
        assert len(lines("without state from now on")) == 1

    def test_the_batch_is_forgotten_when_the_indexer_fails(self, sglang: SGLang) -> None:
        sglang.load()
        indexer = sglang.indexer()
        with pytest.raises(AttributeError):
            indexer._get_topk_paged(sglang.batch([1]), 0, scores(1), None, None)
        named = {"forward_batch": sglang.batch([1]), "layer_id": 0, "q_fp8": scores(1)}
        with pytest.raises(AttributeError):
            indexer._get_topk_paged(**named, weights=None, metadata=None)
        assert sglang.kernel.fast_topk_v2(scores(1), lengths_of([WIDTH]), K).shape == (1, K)


class TestRegistration:
    def test_says_what_is_on(self, sglang: SGLang, lines: Any) -> None:
        sglang.load()
        for _ in range(2):
            sglang.kernel.fast_topk_v2(scores(1), lengths_of([WIDTH]), K)
        assert lines("on: ") == ["on: fast_topk_v2"]

    def test_older_versions_lack_the_newer_functions(self, sglang: SGLang, lines: Any) -> None:
        sglang.load()
        lacking = [line.split(" ")[0] for line in lines("not hooked")]
        newer = ["topk_transform_512_v2", "topk_transform_ragged_v2"]
        assert lacking == ([] if sglang.tree == "sglang_dsa" else newer)

    @pytest.mark.parametrize(
        ("variables", "version", "line"),
        [
            ({}, VERSION, "off: GVR_TOPK_SGLANG=1 is not set"),
            ({ASKED: "0"}, VERSION, "off: GVR_TOPK_SGLANG=0"),
            ({ASKED: "on"}, VERSION, f"refused: {ASKED}: wanted 0, 1 or force, got 'on'. SGLang serves with"),
            ({ASKED: "1"}, "0.6.0", f"refused: wanted SGLang 0.5, got 0.6.0; {ASKED}=force tries it all the"),
            ({ASKED: "1", "GVR_TOPK_DISABLE": "true"}, VERSION, "off: GVR_TOPK_DISABLE is set"),
            ({ASKED: "force"}, "0.6.0", ""),
        ],
    )
    def test_asked_for_and_known(
        self, sglang: SGLang, lines: Any, monkeypatch: Any, variables: dict[str, str], version: str, line: str
    ) -> None:
        """It is off unless it is asked for, because it has not run inside SGLang."""
        monkeypatch.delenv(ASKED)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Engine, "version", lambda engine: version)
        sglang.load()
        sglang.kernel.fast_topk_v2(scores(1), lengths_of([WIDTH]), K)
        if line:
            assert not HookRegistry._hooks and CALLS == {"fast_topk_v2": 1}
            assert len(lines()) == 1 and line in lines()[0]
        else:
            assert HookRegistry._hooks and not CALLS

    def test_changed_signature(self, sglang: SGLang, lines: Any) -> None:
        """Another one, or none that could be read."""

        def changed(score: Any, lengths: Any, topk: int, row_starts: Any = None, sinks: int = 0) -> str:
            return "theirs"

        sglang.kernel.fast_topk_v2 = changed  # type: ignore[attr-defined]
        sglang.kernel.fast_topk_transform_fused = type  # type: ignore[attr-defined]
        sglang.load()
        assert sglang.kernel.fast_topk_v2(None, None, K) == "theirs"
        one, none = [line for line in lines("not hooked") if line.startswith("fast_topk")]
        known, found = "score, lengths, topk, row_starts", "score, lengths, topk, row_starts, sinks"
        assert one == f"fast_topk_v2 not hooked: sgl_kernel.fast_topk_v2: wanted ({known}), got ({found})"
        assert none.startswith("fast_topk_transform_fused not hooked: no signature found")

    def test_module_that_fails_to_import(self, newer: SGLang, lines: Any, tmp_path: Path) -> None:
        """The indexer's module is not loaded before the plugin, and may need what is not there."""
        broken = tmp_path / "dsa_indexer.py"
        broken.write_text("raise OSError('libdeep_gemm.so: cannot open shared object file')\n")
        importlib.import_module("sglang.srt.layers.attention.dsa").__path__ = [str(tmp_path)]
        newer.load()
        assert len(lines("libdeep_gemm.so")) == 1
        newer.kernel.fast_topk_v2(scores(1), lengths_of([WIDTH]), K)
        assert not CALLS

    def test_no_plugin_system(self, sglang: SGLang, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
        register()
        assert len(lines()) == 1
        assert lines()[0].startswith("not active: ModuleNotFoundError")


def test_doctor_is_told_what_would_happen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GVR_TOPK_DISABLE", "GVR_TOPK_SGLANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Engine, "root", lambda engine: None)
    assert plugin.describe() == [("SGLang", "not installed")]
    (tmp_path / "version.py").write_text('__version__ = "0.5.9"\n')
    monkeypatch.setattr(Engine, "root", lambda engine: tmp_path)
    found = ["gvr_topk.integrations.sglang:register"]
    monkeypatch.setattr(Engine, "entry_points", lambda engine: found)
    rows = dict(plugin.describe())
    assert rows["SGLang"] == f"0.5.9 in {tmp_path}"
    assert rows["entry point"] == "gvr_topk = gvr_topk.integrations.sglang:register"
    assert rows["would happen"] == "nothing: GVR_TOPK_SGLANG=1 is not set"
    monkeypatch.setenv("GVR_TOPK_SGLANG", "1")
    said = "the server's log says which functions are hooked"
    for switch, more in (("0", ""), ("1", ", and whether tokens are drawn")):
        monkeypatch.setenv("GVR_TOPK_SAMPLER", switch)
        assert dict(plugin.describe())["would happen"] == said + more
    found.clear()
    assert dict(plugin.describe())["would happen"] == "nothing: SGLang does not find the entry point"
    monkeypatch.setenv("GVR_TOPK_DISABLE", "1")
    assert dict(plugin.describe())["would happen"] == "nothing: GVR_TOPK_DISABLE is set"
