"""Rows in parts on two GPUs, over NCCL or in memory of both: what one GPU chooses, also beside other work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk import TopkState, indexer_topk_decode
from gvr_topk.distributed import Shards, sharded_topk
from tests import shard_ranks
from tests.shard_cases import Case, call, draw_as, expected, share, some_case, some_draws, tokens

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wanted two GPUs")

EITHER_WAY = pytest.mark.parametrize("peer_memory", [False, True], ids=["collectives", "peer memory"])

WORLD = 2
INTERLEAVE = 64
STEPS = 20
STRESS_STEPS = int(os.environ.get("GVR_TOPK_STRESS_STEPS", "1000"))
K = 2048


def run(work: Callable[[Any], Any], argument: Any, folder: Path, seconds: float = 240) -> list[Any]:
    processes = shard_ranks.start(WORLD, folder, work, argument, device="cuda", timeout_s=60)
    return shard_ranks.results(processes, folder, seconds)


def call_all(cases: list[Case]) -> list[tuple[Tensor, ...]]:
    return [call(case, device="cuda") for case in cases]


def test_random_calls(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    cases = [some_case(rng, WORLD) for _ in range(100)]
    results = run(call_all, cases, tmp_path)
    for at, case in enumerate(cases):
        for rank, each in enumerate(results):
            wanted = expected(case, rank)
            assert all(torch.equal(a, b) for a, b in zip(each[at], wanted, strict=True)), (rank, case)


def draw_all(cases: list[Case]) -> list[Tensor]:
    return [draw_as(case, device="cuda") for case in cases]


def test_tokens_are_those_of_the_whole_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    cases = [some_draws(rng, WORLD) for _ in range(100)]
    results = run(draw_all, cases, tmp_path)
    for at, case in enumerate(cases):
        assert all(torch.equal(each[at], tokens(case)) for each in results), case


class Chain:
    """Steps of whole rows that change a little, the same on both ranks, and the part of this one."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self.draw = torch.Generator("cuda").manual_seed(rows + width)
        self.whole = torch.randn(rows, width * WORLD, device="cuda", generator=self.draw)
        self.dtype, self.rank, self.width, self.length = dtype, dist.get_rank(), width, width - 30
        self.part = torch.empty(rows, width, device="cuda", dtype=dtype)
        self.lengths = torch.empty(rows, device="cuda", dtype=torch.int32)
        self.whole_lengths = torch.empty(rows, device="cuda", dtype=torch.int32)
        self.column = torch.arange(width * WORLD, device="cuda")

    def step(self) -> Tensor:
        """Move on, and return the whole rows."""
        noise = torch.randn(self.whole.shape, device="cuda", generator=self.draw)
        self.whole.mul_(0.95).add_(noise, alpha=0.3)
        self.length = min(self.length + 1, self.width)
        self.whole_lengths.fill_(self.length * WORLD - 13)
        rows = self.whole.to(self.dtype)
        mine = (self.column // INTERLEAVE) % WORLD == self.rank
        self.part.copy_(rows[:, mine])
        self.lengths.fill_(int(mine[: self.length * WORLD - 13].sum()))
        return rows


def wrong_rows(got: Any, whole: Tensor, lengths: Tensor) -> int:
    """Compare positions and counts of this rank with what one GPU chooses of the whole rows."""
    best = indexer_topk_decode(whole, lengths, K)
    positions, local, counts = share(best, INTERLEAVE, WORLD, dist.get_rank())
    wrong = (got.positions != positions).any(1) | (got.local != local).any(1)
    return int((wrong | (got.counts != counts)).sum())


def shards_of(peer_memory: bool, group: Any = None, timeout_s: float = 60) -> Shards:
    shards = Shards(group, ownership=INTERLEAVE, device="cuda", peer_memory=peer_memory, timeout_s=timeout_s)
    assert (shards.peers is not None) == peer_memory
    return shards


class OtherWork:
    """Products on one stream, and maxima over both ranks, of another communicator, on a second one."""

    def __init__(self) -> None:
        self.group = dist.new_group()
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()
        self.matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.vector = torch.ones(1 << 20, device="cuda")

    def enqueue(self) -> None:
        with torch.cuda.stream(self.streams[0]):
            torch.mm(self.matrix, self.matrix)
        with torch.cuda.stream(self.streams[1]):
            dist.all_reduce(self.vector, op=dist.ReduceOp.MAX, group=self.group)


def captured(argument: tuple[bool, bool]) -> int:
    """Replay one captured call with rows, lengths and a step that change; returns wrong rows of all steps."""
    peer_memory, beside = argument
    steps, shards = Chain(8, 32_768, torch.float32), shards_of(peer_memory)
    state = TopkState(8, K, "cuda", keep_indices=False)
    number = torch.zeros(1, dtype=torch.int64, device="cuda")
    steps.step()

    def once() -> Any:
        return sharded_topk(steps.part, steps.lengths, K, shards=shards, state=state, step=number)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The thread in which NCCL watches may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = once()
    other = OtherWork() if beside else None
    wrong = 0
    for step in range(STRESS_STEPS if beside else STEPS):
        number.fill_(step)
        whole = steps.step()
        if other is not None:
            other.enqueue()
        graph.replay()
        wrong += wrong_rows(got, whole, steps.whole_lengths)
    torch.cuda.synchronize()
    shards.check()
    return wrong


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@EITHER_WAY
def test_graphs(peer_memory: bool, beside: bool, tmp_path: Path) -> None:
    """Beside means a stream of matrix products and one of sums over NCCL, of another communicator."""
    assert run(captured, (peer_memory, beside), tmp_path) == [0, 0]


def disagree(peer_memory: bool) -> tuple[Any, ...]:
    rank = dist.get_rank()
    shards = Shards(device="cuda", peer_memory=peer_memory)
    logits, lengths = (
        torch.ones(3, 100, device="cuda"),
        torch.full((3,), 100, device="cuda", dtype=torch.int32),
    )
    got = sharded_topk(logits, lengths, 4 + rank, shards=shards)
    torch.cuda.synchronize()
    said = []
    for again in (shards.check, lambda: sharded_topk(logits, lengths, 4, shards=shards)):
        try:
            again()
        except ValueError as error:
            said.append(str(error))
    return got.positions.cpu(), got.counts.cpu(), said


@EITHER_WAY
def test_ranks_that_disagree_select_nothing_and_raise_later(peer_memory: bool, tmp_path: Path) -> None:
    wanted = "wanted the same on all ranks, got k 4 on rank 0 and k 5 on rank 1"
    for positions, counts, said in run(disagree, peer_memory, tmp_path):
        assert bool((positions == -1).all()) and counts.tolist() == [0, 0, 0]
        assert said == [f"gvr_topk.Shards: call: {wanted}"] * 2


def miss_a_call(_: Any) -> list[Any]:
    shards = Shards(device="cuda", timeout_s=1)
    logits, lengths = (
        torch.ones(3, 100, device="cuda"),
        torch.full((3,), 100, device="cuda", dtype=torch.int32),
    )
    sharded_topk(logits, lengths, 4, shards=shards)
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(3)
        return []
    started = time.monotonic()
    got = sharded_topk(logits, lengths, 4, shards=shards)
    torch.cuda.synchronize()
    said: list[Any] = [time.monotonic() - started, got.counts.tolist()]
    for again in (shards.check, lambda: sharded_topk(logits, lengths, 4, shards=shards)):
        with pytest.raises(RuntimeError) as error:
            again()
        said.append(str(error.value))
    return said


def test_a_rank_that_is_late(tmp_path: Path) -> None:
    (seconds, counts, *said), _ = run(miss_a_call, None, tmp_path)
    assert 1 < seconds < 2 and counts == [0, 0, 0]
    wanted = "gvr_topk.Shards: rank 1 was not heard of within 1 s; all ranks have to make their Shards anew"
    assert said == [wanted, wanted]


def make_anew(_: Any) -> list[tuple[int, str]]:
    """Make Shards, and miss a call as rank 1; returns wrong rows and what was said, four times."""
    steps = Chain(3, 8192, torch.float32)
    said = []
    for _ in range(4):
        group = dist.new_group()
        shards = shards_of(True, group, timeout_s=0.5)
        whole = steps.step()
        got = sharded_topk(steps.part, steps.lengths, K, shards=shards)
        wrong = wrong_rows(got, whole, steps.whole_lengths)
        if dist.get_rank() == 0:
            sharded_topk(steps.part, steps.lengths, K, shards=shards)  # the other rank misses it
        torch.cuda.synchronize()
        try:
            shards.check()
            said.append((wrong, ""))
        except RuntimeError as error:
            said.append((wrong, str(error)))
        dist.barrier()
        del shards, got
        dist.destroy_process_group(group)
    return said


def test_shards_made_anew_are_in_order(tmp_path: Path) -> None:
    late = "gvr_topk.Shards: rank 1 was not heard of within 0.5 s; all ranks have to make their Shards anew"
    assert run(make_anew, None, tmp_path) == [[(0, late)] * 4, [(0, "")] * 4]


def die_in_the_middle(_: Any) -> list[Any]:
    """Kill rank 1 while its GPU works; returns what rank 0 gets, is told, and after how many seconds."""
    steps, shards = Chain(3, 8192, torch.float32), shards_of(True, timeout_s=2)
    whole = steps.step()

    def once() -> Any:
        return sharded_topk(steps.part, steps.lengths, K, shards=shards)

    wrong = wrong_rows(once(), whole, steps.whole_lengths)
    dist.barrier()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        for _ in range(100):
            once()
        os.kill(os.getpid(), signal.SIGKILL)
    started, said = time.monotonic(), ""
    while not said:
        try:
            got = once()
            torch.cuda.synchronize()
        except RuntimeError as error:
            said = str(error)
    return [wrong, got.counts.tolist(), time.monotonic() - started, said]


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    (wrong, counts, seconds, said), killed = run(die_in_the_middle, None, tmp_path)
    assert killed is None and wrong == 0 and counts == [0, 0, 0] and seconds < 4
    assert said == (
        "gvr_topk.Shards: rank 1 was not heard of within 2 s; all ranks have to make their Shards anew"
    )
