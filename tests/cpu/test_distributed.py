"""Rows in parts on several ranks: the choice of the whole row, and errors instead of hangs."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import threading
import time
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk import TopkState, indexer_topk_decode
from gvr_topk.constants import PEER_CELLS, PEER_CTAS
from gvr_topk.distributed import Shards, peers, sharded_sample, sharded_topk, topk
from gvr_topk.distributed import shards as module
from gvr_topk.ops import launch
from gvr_topk.sampling import sample
from tests import shard_ranks
from tests.shard_cases import POISON, Case, call, cut, draw_as, expected, some_case, some_draws, tokens


def check(case: Case, results: list[Any]) -> None:
    for rank, result in enumerate(results):
        assert not isinstance(result, BaseException) and result is not None, result
        for name, got, wanted in zip(("out", "local", "counts"), result, expected(case, rank), strict=True):
            assert torch.equal(got, wanted), (rank, name, case)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_random_calls(world: int) -> None:
    rng = np.random.default_rng(world)
    cases = [some_case(rng, world) for _ in range(60)]
    results = shard_ranks.in_threads(world, lambda group: [call(case, group) for case in cases])
    for at, case in enumerate(cases):
        check(case, [each if isinstance(each, Exception) else each[at] for each in results])


def call_all(cases: list[Case]) -> list[tuple[Tensor, ...]]:
    return [call(case) for case in cases]


@pytest.mark.parametrize("world", [2, 5])
def test_processes(world: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(world + 10)
    cases = [some_case(rng, world) for _ in range(20)]
    results = shard_ranks.results(shard_ranks.start(world, tmp_path, call_all, cases), tmp_path)
    for at, case in enumerate(cases):
        check(case, [each[at] for each in results])


def call_in_pairs(cases: list[Case]) -> list[tuple[Tensor, ...]]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return [call(case, groups[dist.get_rank() // 2]) for case in cases]


def test_processes_in_groups_of_two(tmp_path: Path) -> None:
    rng = np.random.default_rng(20)
    cases = [some_case(rng, 2) for _ in range(10)]
    results = shard_ranks.results(shard_ranks.start(4, tmp_path, call_in_pairs, cases), tmp_path)
    for at, case in enumerate(cases):
        for pair in (results[:2], results[2:]):
            check(case, [each[at] for each in pair])


def rows_of(kind: str, world: int, width: int) -> list[Tensor]:
    """Long rows: where the best lie decides how far the samples lead."""
    draw = torch.Generator().manual_seed(world)
    parts = [torch.randn(2, width, generator=draw) for _ in range(world)]
    if kind == "one rank":
        parts[-1] += 100
    elif kind == "tied":
        parts = [torch.ones(2, width) for _ in range(world)]
    elif kind == "in turn":
        whole = torch.arange(world * width, dtype=torch.float32).flip(0).repeat(2, 1)
        parts = [whole[:, rank::world].contiguous() for rank in range(world)]
    elif kind == "unlike":
        parts = [part * 10.0**-rank for rank, part in enumerate(parts)]
    return parts


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what rank 0 sends."""
    shapes: list[tuple[int, ...]] = []
    exchange = Shards.exchange

    def noted(self: Shards, records: Tensor) -> Tensor:
        if self.rank == 0:
            shapes.append(tuple(records.shape))
        return exchange(self, records)

    monkeypatch.setattr(Shards, "exchange", noted)
    return shapes


OF_2048 = {"k": 2048, "ownership": 16, "record": None, "gather": False}


@pytest.mark.parametrize("kind", ["random", "one rank", "tied", "in turn", "unlike"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_two_rounds_serve_k_of_2048(world: int, kind: str, sent: list[tuple[int, ...]]) -> None:
    lengths = [torch.tensor([5000, 4000 - 1999 * rank], dtype=torch.int32) for rank in range(world)]
    case = {**OF_2048, "parts": rows_of(kind, world, 5000), "lengths": lengths, "expected": [None] * world}
    check(case, shard_ranks.in_threads(world, functools.partial(call, case)))
    record = {2: 64, 3: 96, 5: 128}[world]
    assert sent == [(1, 3), (2, 1 + record), (2, 1 + record)]  # the header, and two rounds


def test_expected_counts_save_a_round(sent: list[tuple[int, ...]]) -> None:
    """Counts that are off by less than half of a record, on each rank, need one round, and others three."""
    lengths = [torch.tensor([5000, 700], dtype=torch.int32)] * 3
    case: Case = {**OF_2048, "parts": rows_of("random", 3, 5000), "lengths": lengths}
    counts = [expected(case, rank)[2] for rank in range(3)]
    for off, rounds in (
        ([0, 0, 0], 1),
        ([46, -46, 46], 1),
        ([0, 0, 48], 3),
        ([0, -48, 0], 3),
        ([-2000] * 3, 3),
    ):
        sent.clear()
        case["expected"] = [count + by for count, by in zip(counts, off, strict=True)]
        check(case, shard_ranks.in_threads(3, functools.partial(call, case)))
        assert sent == [(1, 3)] + [(2, 97)] * rounds, off


def test_records_grow_with_the_root_of_the_ranks() -> None:
    sizes = {world: module.record_words(world) for world in range(1, module.MAX_RANKS + 1)}
    assert [sizes[world] for world in (1, 2, 4, 8, 16, 64, 512)] == [64, 64, 96, 128, 192, 384, 1024]
    for world, words in sizes.items():
        assert world * -(-2048 // words) <= words and 2 * world <= words


def test_state_changes_nothing_and_is_written() -> None:
    draw = torch.Generator().manual_seed(3)
    parts = [torch.randn(4, 300, generator=draw) for _ in range(2)]
    lengths = torch.tensor([300, 300, 12, 250], dtype=torch.int32)
    slots = torch.tensor([2, 0, 1, 3], dtype=torch.int32)

    def work(group: dist.ProcessGroup) -> Any:
        shards = Shards(group, 4)
        state, alone = TopkState(4, 16), TopkState(4, 16)
        part = parts[shards.rank]
        got = sharded_topk(part, lengths, 16, shards=shards, state=state, row_slot=slots)
        without = sharded_topk(part, lengths, 16, shards=shards)
        indexer_topk_decode(part, lengths, 16, state=alone, row_slot=slots)
        assert torch.equal(state.words, alone.words) and not torch.equal(state.words, TopkState(4, 16).words)
        return all(torch.equal(a, b) for a, b in zip(got, without, strict=True))

    assert shard_ranks.in_threads(2, work) == [True, True]


def test_results_are_in_the_order_of_what_was_selected() -> None:
    draw = torch.Generator().manual_seed(4)
    parts = [torch.randn(5, 90, generator=draw).round() for _ in range(3)]
    lengths, k = torch.tensor([90, 20, 0, 90, 7], dtype=torch.int32), 30
    order = torch.randperm(k, generator=draw)

    def work(group: dist.ProcessGroup) -> Any:
        shards = Shards(group, 16)
        part = parts[shards.rank]
        best = indexer_topk_decode(part, lengths, k)[:, order]
        got = sharded_topk(part, lengths, k, shards=shards, out=best.clone(), selected=True)
        usual = sharded_topk(part, lengths, k, shards=shards)
        assert torch.equal(got.counts, usual.counts)
        for row, count in enumerate(got.counts.tolist()):
            kept = best[row][torch.isin(best[row], usual.local[row]) & (best[row] >= 0)]
            assert torch.equal(got.local[row, :count], kept) and bool((got.local[row, count:] == -1).all())
            where = got.local[row, :count].sort().indices
            assert torch.equal(got.positions[row, :count][where], usual.positions[row, :count])
        return int(got.counts.sum())

    counts = shard_ranks.in_threads(3, work)
    assert sum(counts) == 30 + 30 + 0 + 30 + 21 and min(counts) > 0


DISAGREEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"k": 5}, "k 4 on rank 0 and k 5 on rank 1"),
    ({"rows": 3}, "rows 2 on rank 0 and rows 3 on rank 1"),
    ({"dtype": torch.float16}, "dtype torch.float32 on rank 0 and dtype torch.float16 on rank 1"),
    ({"ownership": 8}, "ownership contiguous on rank 0 and ownership 8 on rank 1"),
    ({"record": 16}, "record 64 on rank 0 and record 16 on rank 1"),
    ({"gather": True}, "gather 0 on rank 0 and gather 1 on rank 1"),
    ({"expected": torch.zeros(2).int()}, "expected 0 on rank 0 and expected 1 on rank 1"),
    ({"step": 8}, "step 7 on rank 0 and step 8 on rank 1"),
    ({"step": torch.tensor([8])}, "step 7 on rank 0 and step 8 on rank 1"),
    ({"k": 5, "step": -1}, "step 7, k 4 on rank 0 and step -1, k 5 on rank 1"),
]


@pytest.mark.parametrize(("of_rank_1", "said"), DISAGREEMENTS, ids=[said for _, said in DISAGREEMENTS])
def test_ranks_that_disagree(of_rank_1: dict[str, Any], said: str) -> None:
    """All of them raise, also in the next call, and nothing is written."""

    def work(group: dist.ProcessGroup) -> Any:
        mine: dict[str, Any] = {"k": 4, "rows": 2, "dtype": torch.float32, "ownership": "contiguous"}
        mine |= {"record": 64, "gather": False, "step": 7, "expected": None}
        mine |= of_rank_1 if group.rank() == 1 else {}
        shards = Shards(group, mine["ownership"], record=mine["record"])
        logits = torch.zeros(mine["rows"], 9, dtype=mine["dtype"])
        lengths = torch.full((mine["rows"],), 9, dtype=torch.int32)
        out = torch.full((mine["rows"], mine["k"]), POISON, dtype=torch.int32)
        options = {name: mine[name] for name in ("gather", "expected", "step")}
        message = re.escape(f"gvr_topk.Shards: call: wanted the same on all ranks, got {said}")
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                sharded_topk(logits, lengths, mine["k"], shards=shards, out=out, **options)
        with pytest.raises(ValueError, match=re.escape(said)):
            shards.check()
        return bool((out == POISON).all())

    assert shard_ranks.in_threads(3, work) == [True] * 3


def call_until_the_end(argument: tuple[Path, float]) -> tuple[str, float]:
    """Call again and again, rank 1 with one delay; returns the error, and how long it took to come."""
    folder, delay_s = argument
    shards = Shards()
    before = time.monotonic()
    for step in range(10**6):
        if step == 3:
            (folder / f"called.{shards.rank}").touch()
            if shards.rank == 1:
                time.sleep(delay_s)
        before = time.monotonic()
        lengths = torch.full((2,), 50, dtype=torch.int32)
        try:
            sharded_topk(torch.randn(2, 50), lengths, 9, shards=shards, step=step)
        except RuntimeError as error:
            return str(error), time.monotonic() - before
    return "", 0.0


def test_a_killed_rank_ends_in_an_error_on_the_others(tmp_path: Path) -> None:
    processes = shard_ranks.start(3, tmp_path, call_until_the_end, (tmp_path, 0.0), timeout_s=10)
    until = time.monotonic() + 30
    while not (tmp_path / "called.1").exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(processes[1].pid, signal.SIGKILL)
    first, killed, last = shard_ranks.results(processes, tmp_path, 30)
    assert killed is None
    assert all(said and seconds < 12 for said, seconds in (first, last))


def test_a_late_rank_ends_in_an_error_on_all(tmp_path: Path) -> None:
    processes = shard_ranks.start(3, tmp_path, call_until_the_end, (tmp_path, 5.0), timeout_s=2)
    results = shard_ranks.results(processes, tmp_path, 30)
    assert all(said and seconds < 4 for said, seconds in results)
    assert any("2000ms" in said for said, _ in results)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_tokens_are_those_of_the_whole_row(world: int) -> None:
    rng = np.random.default_rng(world + 100)
    cases = [some_draws(rng, world) for _ in range(150)]
    results = shard_ranks.in_threads(world, lambda group: [draw_as(case, group) for case in cases])
    drawn = set()
    assert not any(isinstance(each, Exception) for each in results), results
    for at, case in enumerate(cases):
        wanted = tokens(case)
        assert all(torch.equal(each[at], wanted) for each in results), (case, wanted)
        drawn |= set(wanted.tolist())
    assert len(drawn) > 60 and -1 in drawn


ROWS = torch.zeros(2, 9)
LENGTHS = torch.full((2,), 9, dtype=torch.int32)
FOUR = torch.zeros(2, 4, dtype=torch.int32)
WRONG_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"shards": None}, "shards: wanted a Shards, got NoneType"),
    ({"logits": ROWS.double()}, "logits: wanted dtype float32, bfloat16 or float16, got float64"),
    ({"logits": ROWS.to("meta")}, "logits: wanted a tensor on cpu, got meta"),
    ({"lengths": LENGTHS[:1]}, "lengths: wanted shape [2], got [1]"),
    ({"k": 0}, "k: wanted 1 to 2097152, got 0"),
    ({"k": 1.5}, "k: wanted an integer, got 1.5"),
    ({"out": torch.zeros(2, 3, dtype=torch.int32)}, "out: wanted at least k = 4 columns, got [2, 3]"),
    ({"local": torch.zeros(2, 4)}, "local: wanted dtype int32, got float32"),
    ({"counts": torch.zeros(3, dtype=torch.int32)}, "counts: wanted shape [2], got [3]"),
    ({"out": FOUR, "local": FOUR}, "local: wanted memory of its own, got memory shared with out"),
    ({"counts": LENGTHS}, "counts: wanted memory of its own, got memory shared with lengths"),
    ({"expected": LENGTHS[:1]}, "expected: wanted shape [2], got [1]"),
    ({"gather": 1}, "gather: wanted true or false, got 1"),
    ({"selected": True}, "selected: wanted out with what is selected, got none"),
    ({"selected": 1}, "selected: wanted true or false, got 1"),
    ({"step": "a"}, "step: wanted an integer, got 'a'"),
    ({"step": torch.zeros(1)}, "step: wanted dtype int64, got float32"),
    ({"step": torch.zeros(2).long()}, "step: wanted shape [1], got [2]"),
    ({"step": 1 << 63}, f"step: wanted {-(1 << 63)} to {(1 << 63) - 1}, got {1 << 63}"),
]
WRONG_DRAWS: list[tuple[dict[str, Any], str]] = [
    ({"shards": 1}, "shards: wanted a Shards, got int"),
    ({"logits": ROWS[:, :0]}, "logits: wanted 1 to 1048576 columns, got 0"),
    ({"logits": ROWS.to("meta")}, "logits: wanted a tensor on cpu, got meta"),
    ({"most": 1 << 20}, "most: wanted 1 to 524288, got 1048576"),
    ({"most": 0}, "most: wanted 1 to 524288, got 0"),
    ({"order": "joint"}, "order: wanted 'vllm' or 'hf' or 'temperature_last', got 'joint'"),
    ({"step": None}, "step: wanted an integer, got None"),
]
WRONG_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"out": torch.zeros(2)}, "out: wanted dtype int64 or int32, got float32"),
    ({"slots": LENGTHS[:1]}, "slots: wanted shape [2], got [1]"),
    ({"temperature": "hot"}, "temperature: wanted a number or a tensor, got 'hot'"),
    ({"top_k": 1.5}, "top_k: wanted an integer, got 1.5"),
    ({"seeds": torch.zeros(2)}, "seeds: wanted dtype int64, got float32"),
    ({"positions": torch.zeros(1).long()}, "positions: wanted shape [2], got [1]"),
]
OTHERS: dict[Any, dict[str, Any]] = {
    sharded_topk: {"lengths": LENGTHS, "k": 4},
    sharded_sample: {"most": 4, "seeds": 1, "positions": 0},
}
REFUSED = [
    *((sharded_topk, "sharded_topk", *each) for each in WRONG_CALLS),
    *((sharded_sample, "sharded_sample", *each) for each in WRONG_DRAWS),
    *((sharded_sample, "sample", *each) for each in WRONG_PARAMETERS),
]


@pytest.mark.parametrize(("function", "op", "wrong", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_wrong_calls(function: Any, op: str, wrong: dict[str, Any], said: str) -> None:
    """They are refused before anything is sent, so rank 1 need not be there; parameters as by `sample`."""

    def work(group: dist.ProcessGroup) -> None:
        given = {"logits": ROWS, "shards": Shards(group), **OTHERS[function]}
        if group.rank() == 0:
            function(**given | wrong)

    error, _ = shard_ranks.in_threads(2, work)
    assert isinstance(error, ValueError) and str(error) == f"gvr_topk.{op}: {said}"


def test_ranks_that_disagree_about_draws() -> None:
    def work(group: dist.ProcessGroup) -> None:
        most, step = 4 + group.rank(), torch.tensor(3 * group.rank())
        sharded_sample(ROWS, most, shards=Shards(group), seeds=1, positions=0, step=step)

    said = "wanted the same on all ranks, got step 0, k 4 on rank 0 and step 3, k 5 on rank 1"
    for error in shard_ranks.in_threads(2, work):
        assert isinstance(error, ValueError) and str(error) == f"gvr_topk.Shards: call: {said}"


def test_draws_without_filters() -> None:
    """All parameters are as in `sample`, and the best tokens stand for the whole vocabulary."""
    logits = torch.linspace(0, 1, 40).repeat(30, 1)
    positions = torch.arange(30)

    def work(group: dist.ProcessGroup) -> Tensor:
        part = cut(logits, 2, group.rank(), "contiguous", 1)
        return sharded_sample(part, 9, shards=Shards(group), seeds=4, positions=positions)

    wanted = sample(logits, seeds=4, positions=positions, top_k=9)
    assert len(set(wanted.tolist())) > 5
    assert all(torch.equal(tokens, wanted) for tokens in shard_ranks.in_threads(2, work))


def test_ranks_that_hear_of_it_afterwards() -> None:
    """As on a GPU, whose host does not wait: the call selects nothing, and the next one raises."""

    def work(group: dist.ProcessGroup) -> Any:
        shards = Shards(group)
        shards._late = True
        fine = sharded_topk(ROWS, LENGTHS, 4, shards=shards, step=3)
        shards.check()
        # NaN at the first position of all, where the largest word is.
        got = sharded_topk(ROWS * torch.nan, LENGTHS, 4, shards=shards, step=group.rank())
        late = Shards(group)
        late._late = True
        token = sharded_sample(ROWS, 4, shards=late, seeds=1, positions=0, step=group.rank())
        with pytest.raises(ValueError, match="got step 0 on rank 0 and step 1 on rank 1"):
            sharded_topk(ROWS, LENGTHS, 4, shards=shards, step=4)
        return fine.counts.tolist(), got.positions.tolist(), got.counts.tolist(), token.tolist()

    first, second = shard_ranks.in_threads(2, work)
    nothing = [[-1] * 4] * 2
    assert first[0] == [4, 4] and second[0] == [0, 0]
    assert first[1:3] == second[1:3] == (nothing, [0, 0]) and first[3] == second[3] == [-1, -1]


SECONDS = "timeout_s: wanted more than 0 and less than 86400 seconds, got"
WRONG_SHARDS: list[tuple[dict[str, Any], str]] = [
    ({"group": 5}, "group: wanted a process group with this process, got int"),
    ({"ownership": "striped"}, "ownership: wanted 'contiguous' or an integer, got 'striped'"),
    ({"ownership": 0}, "ownership: wanted 1 to 2097152, got 0"),
    ({"device": "nowhere"}, "device: wanted a torch.device or the name of one, got 'nowhere'"),
    ({"record": 3}, "record: wanted 4 to 2097152, got 3"),
    *(({"timeout_s": each}, f"{SECONDS} {each!r}") for each in ("3", 0, -1.0, float("nan"), 86_400)),
    ({"peer_memory": 1}, "peer_memory: wanted true or false, got 1"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG_SHARDS, ids=[said for _, said in WRONG_SHARDS])
def test_wrong_shards(wrong: dict[str, Any], said: str) -> None:
    for error in shard_ranks.in_threads(2, lambda group: Shards(**{"group": group, **wrong})):
        assert isinstance(error, ValueError) and str(error) == f"gvr_topk.Shards: {said}"


def test_no_rows_and_another_default_device() -> None:
    def work(group: dist.ProcessGroup) -> Any:
        with torch.device("meta"):
            shards = Shards(group)
            got = sharded_topk(ROWS, LENGTHS, 4, shards=shards, gather=True)
            address = peers.Peers(0, [1, 2], torch.device("cpu"), 1.0)._inboxes
            none = sharded_topk(ROWS[:0], LENGTHS[:0], 4, shards=shards, gather=True)
        return got.positions.tolist(), str(address.device), list(none.positions.shape)

    wanted = shard_ranks.in_threads(
        2, lambda group: sharded_topk(ROWS, LENGTHS, 4, shards=Shards(group), gather=True).positions.tolist()
    )
    assert shard_ranks.in_threads(2, work) == [(each, "cpu", [0, 4]) for each in wanted]


def test_shards_know_their_ranks() -> None:
    both = shard_ranks.in_threads(2, lambda group: Shards(group, 1 << 21))
    assert [(each.rank, each.world, each.record) for each in both] == [(0, 2, 64), (1, 2, 64)]
    assert all(each.check() is None for each in both)


def test_results_are_allocated() -> None:
    def work(group: dist.ProcessGroup) -> Any:
        return sharded_topk(torch.tensor([[1.0, 5.0, 5.0, 2.0]]), LENGTHS[:1], 3, shards=Shards(group))

    first, second = shard_ranks.in_threads(2, work)
    assert first.positions.tolist() == first.local.tolist() == [[1, 2, -1]] and first.counts.tolist() == [2]
    assert (second.positions.tolist(), second.local.tolist()) == ([[5, -1, -1]], [[1, -1, -1]])
    assert {each.dtype for each in second} == {torch.int32} and second.counts.tolist() == [1]


def test_no_group(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group: wanted a process group with this process, got NoneType"):
        Shards()


# ---------------------------------------------------------------- memory of all ranks, in which a GPU agrees


class Memory:
    """In the place of PyTorch's symmetric memory: tensors of this process, 8 numbers behind their start."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.starts: dict[int, int] = {}
        self.said: list[str | None] = []
        self.waited: list[None] = []
        self.barrier = threading.Barrier(2)

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.said.append(os.environ.get(MULTICAST))
        (count,), _ = size, stride
        if self.fails == "empty" and threading.current_thread() is threading.main_thread():
            raise RuntimeError("no such memory")
        return torch.ones(count + 8, dtype=dtype, device=device)[8:]

    def rendezvous(self, inbox: Tensor, group: dist.ProcessGroup) -> Any:
        self.said.append(os.environ.get(MULTICAST))
        self.starts[group.rank()] = inbox.data_ptr() - 64
        self.barrier.wait(10)
        starts = [self.starts[0], self.starts[1]]
        if group.rank() == 1:
            if self.fails == "rendezvous":
                raise RuntimeError("no such memory")
            starts = {"None": [], "few": starts[:1], "zero": [0, starts[1]]}.get(self.fails, starts)
        return types.SimpleNamespace(buffer_ptrs=starts) if starts else None


MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def connected(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(dist, "_symmetric_memory", memory, raising=False)
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: memory.waited.append(None))

    def work(group: dist.ProcessGroup) -> Any:
        shards = Shards(group)
        return peers.connect(group, shards.device, 3.0, shards.exchange)

    return shard_ranks.in_threads(2, work)


def test_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    for rank, each in enumerate(connected(memory, monkeypatch)):
        addresses = each._inboxes.tolist()
        inbox = each._owner[0]
        assert each.rank == rank and addresses[rank] == inbox.data_ptr() and len(addresses) == 2
        assert addresses == [memory.starts[0] + 64, memory.starts[1] + 64]
        assert inbox.numel() == 2 * PEER_CTAS * PEER_CELLS and not inbox.any()
    assert memory.said == ["1"] * 4 and len(memory.waited) == 4


@pytest.mark.parametrize("before", [None, "0"])
def test_multicast_is_as_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MULTICAST, raising=False)
    if before is not None:
        monkeypatch.setenv(MULTICAST, before)
    with contextlib.suppress(RuntimeError), peers._no_multicast():
        assert os.environ[MULTICAST] == "1"
        raise RuntimeError
    assert os.environ.get(MULTICAST) == before


@pytest.mark.parametrize("fails", ["empty", "rendezvous", "None", "few", "zero"])
def test_memory_that_one_rank_cannot_share_is_used_by_none(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connected(Memory(fails), monkeypatch) == [None, None]


def test_ranks_on_several_hosts_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    assert peers._host() == zlib.crc32(name.encode())
    monkeypatch.setattr(peers, "_host", threading.get_ident)
    assert connected(Memory(), monkeypatch) == [None, None]


def test_too_many_ranks_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEER_RANKS", 1)
    assert connected(Memory(), monkeypatch) == [None, None]


def some_peers() -> peers.Peers:
    return peers.Peers(1, [1000, 2000], torch.device("cpu"), 0.25)


def test_shards_say_what_their_peers_have_heard() -> None:
    def work(group: dist.ProcessGroup) -> Any:
        shards = Shards(group)
        shards.peers = some_peers()
        shards.check()
        shards.peers._told[2, 0] = 1
        with pytest.raises(RuntimeError) as late:
            shards.check()
        shards.peers._told[2, 0] = 2
        with pytest.raises(RuntimeError) as met:
            shards.check()
        shards.peers._told[1, 2] = 7
        with pytest.raises(ValueError, match="got step 0 on rank 0 and step 7 on rank 1"):
            shards.check()
        return str(late.value), str(met.value)

    then = "all ranks have to make their Shards anew"
    late = f"gvr_topk.Shards: rank 0 was not heard of within 0.25 s; {then}"
    met = f"gvr_topk.Shards: two calls ran at once, on two streams; {then}"
    assert shard_ranks.in_threads(1, work) == [(late, met)]


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_call_through_peers(given: bool, gather: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, and a stand-in for the kernel, which checks the arguments and chooses the first item."""
    step = torch.tensor(9) if given else 8

    def kernel(a: peers.ShardedArguments) -> None:
        peers.check_sharded(a)
        assert module._fields_of([a.first_word, a.second_word, 8]) == {
            "step": 8,
            "rows": 2,
            "k": 4,
            "gather": gather,
            "expected": False,
            "record": 64,
            "ownership": 3,
            "dtype": torch.float32,
        }
        assert (a.k, a.rank, a.interleave, a.timeout_ns) == (4, 1, 3, 250_000_000)
        assert a.inboxes.tolist() == [1000, 2000] and a.lengths is LENGTHS
        assert (a.step_value, None if a.step is None else a.step.tolist()) == (
            (0, [9]) if given else (8, None)
        )
        assert torch.equal(a.best, indexer_topk_decode(ROWS, LENGTHS, 4))
        for tensor, value in ((a.out, 6), (a.local, 2)):
            tensor[:, :4] = torch.tensor([value, -1, -1, -1])
        a.counts.fill_(1)

    def work(group: dist.ProcessGroup) -> Any:
        monkeypatch.setattr(topk, "launch", kernel)
        shards = Shards(group, 3)
        shards.peers = some_peers()
        results: Any = {}
        if given:
            wide = torch.full((len(ROWS), 5), POISON, dtype=torch.int32)
            results = {"out": wide, "local": wide.clone(), "counts": wide[:, 0].clone()}
        got = sharded_topk(ROWS, LENGTHS, 4, shards=shards, step=step, gather=gather, **results)
        assert not given or all(a is b for a, b in zip(results.values(), got, strict=True))
        large = sharded_topk(ROWS, LENGTHS, 2049, shards=shards)  # by collectives
        return [each.tolist() for each in got], large.counts.tolist()

    ((positions, local, counts), large) = shard_ranks.in_threads(1, work)[0]
    behind = [POISON] if given else []
    assert positions == [[6, -1, -1, -1, *behind]] * 2 and local == [[2, -1, -1, -1, *behind]] * 2
    assert counts == [1, 1] and large == LENGTHS.tolist()


def test_peers_agree_on_a_gpu_alone() -> None:
    out, local, best = torch.zeros(3, 2, 4, dtype=torch.int32)
    results = out, local, torch.zeros(2, dtype=torch.int32)
    call = some_peers().arguments(ROWS, LENGTHS, best, results, 4, 0, (0, 0), 0)
    with pytest.raises(
        ValueError, match=r"^gvr_topk\.sharded_topk: logits: wanted a tensor on a GPU, got cpu$"
    ):
        launch(call)
    told = torch.zeros(3, 4, dtype=torch.int64)[:, :3]
    with pytest.raises(ValueError, match=r"told: wanted contiguous rows"):
        peers.check_sharded(call._replace(told=told))
