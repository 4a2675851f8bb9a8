"""Rows in parts on several ranks: the choice of the whole row, and errors instead of hangs."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk import TopkState
from gvr_topk.distributed import Shards, sharded_sample, sharded_topk
from gvr_topk.distributed import shards as module
from gvr_topk.sampling import sample
from tests import shard_ranks

INF, NAN = torch.inf, torch.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON = 77
Case = dict[str, Any]


def some_scores(rng: np.random.Generator, rows: int, width: int) -> Tensor:
    """Rows of one of five kinds: distinct, tied, all equal, masked, or with all that is not a number."""
    values = rng.standard_normal((rows, width)).astype(np.float32)
    kind = rng.integers(5)
    if kind == 1:
        values = rng.integers(0, 3, (rows, width)).astype(np.float32)
    elif kind == 2:
        values[:] = 1.5
    elif kind == 3:
        values[rng.random((rows, width)) < 0.7] = -np.inf
    elif kind == 4:
        values = rng.choice(np.array([NAN, INF, -INF, 0.0, -0.0, 1e-40, 1.0], np.float32), (rows, width))
    return torch.from_numpy(values)


def some_case(rng: np.random.Generator, world: int) -> Case:
    """Draw a call: parts of every rank, with their lengths, and the options."""
    rows = int(rng.integers(1, 4))
    ownership = rng.choice(["contiguous", "1", "3", "16", "200"])
    widths = rng.integers(0, 90, world) if rng.random() < 0.3 else np.full(world, rng.integers(1, 150))
    dtype = DTYPES[rng.integers(3)]
    one = rng.random() < 0.2  # all large scores on one rank
    parts = [
        (some_scores(rng, rows, int(width)) + 100 * (one and rank == world - 1)).to(dtype)
        for rank, width in enumerate(widths)
    ]
    ends = [
        np.full(rows, width) if rng.random() < 0.4 else rng.integers(-2, width + 4, rows) for width in widths
    ]
    return {
        "parts": parts,
        "lengths": [torch.tensor(end, dtype=torch.int32) for end in ends],
        "k": int(rng.choice([1, 2, 7, 33, 64, 150, 333])),
        "ownership": ownership if ownership == "contiguous" else int(ownership),
        "record": int(rng.choice([2 * world, 2 * world + 1, 16, 40])),
        "gather": bool(rng.random() < 0.3),
    }


def call(case: Case, group: dist.ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Run a case as one rank, with poisoned outputs that are wider than k."""
    shards = Shards(group, case["ownership"], record=case["record"])
    part = case["parts"][shards.rank]
    rows, k = len(part), case["k"]
    wide = torch.full((rows, part.shape[1] + 3), INF, dtype=part.dtype)
    wide[:, : part.shape[1]] = part
    out, local = (torch.full((rows, k + 2), POISON, dtype=torch.int32) for _ in range(2))
    counts = torch.full((rows,), POISON, dtype=torch.int32)
    returned = sharded_topk(
        wide[:, : part.shape[1]],
        case["lengths"][shards.rank],
        k,
        shards=shards,
        out=out,
        local=local,
        counts=counts,
        gather=case["gather"],
    )
    assert returned.positions is out and returned.local is local and returned.counts is counts
    return out, local, counts


def expected(case: Case, rank: int) -> tuple[Tensor, ...]:
    """What a rank has to get, poison included."""
    found = shard_ranks.chosen(case["parts"], case["lengths"], case["k"], case["ownership"])
    out, local = (torch.full((len(found), case["k"] + 2), -1, dtype=torch.int32) for _ in range(2))
    out[:, case["k"] :] = local[:, case["k"] :] = POISON
    for row, ranks in enumerate(found):
        positions, columns = ranks[rank]
        if case["gather"]:
            positions = sorted(position for each, _ in ranks for position in each)
        out[row, : len(positions)] = torch.tensor(positions)
        local[row, : len(columns)] = torch.tensor(columns)
    return out, local, torch.tensor([len(ranks[rank][1]) for ranks in found], dtype=torch.int32)


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


@pytest.mark.parametrize("kind", ["random", "one rank", "tied", "in turn", "unlike"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_two_rounds_serve_k_of_2048(world: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, ...]] = []
    exchange = Shards.exchange

    def noted(self: Shards, records: Tensor) -> Tensor:
        if self.rank == 0:
            sent.append(tuple(records.shape))
        return exchange(self, records)

    monkeypatch.setattr(Shards, "exchange", noted)
    case = {
        "parts": rows_of(kind, world, 5000),
        "lengths": [torch.tensor([5000, 4000 - 1999 * rank], dtype=torch.int32) for rank in range(world)],
        "k": 2048,
        "ownership": 16,
        "record": None,
        "gather": False,
    }
    check(case, shard_ranks.in_threads(world, functools.partial(call, case)))
    record = {2: 64, 3: 96, 5: 128}[world]
    assert sent == [(1, 3), (2, 1 + record), (2, 1 + record)]  # the header, and two rounds


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
        from gvr_topk import indexer_topk_decode

        indexer_topk_decode(part, lengths, 16, state=alone, row_slot=slots)
        assert torch.equal(state.words, alone.words) and bool(
            (state.words[:, 0] != alone.words[0, 0] - 1).all()
        )
        return all(torch.equal(a, b) for a, b in zip(got, without, strict=True))

    assert shard_ranks.in_threads(2, work) == [True, True]


DISAGREEMENTS = {
    "k": ({"k": 5}, "k 4 on rank 0 and k 5 on rank 1"),
    "rows": ({"rows": 3}, "rows 2 on rank 0 and rows 3 on rank 1"),
    "dtype": ({"dtype": torch.float16}, "dtype torch.float32 on rank 0 and dtype torch.float16 on rank 1"),
    "ownership": ({"ownership": 8}, "ownership contiguous on rank 0 and ownership 8 on rank 1"),
    "record": ({"record": 16}, "record 64 on rank 0 and record 16 on rank 1"),
    "gather": ({"gather": True}, "gather 0 on rank 0 and gather 1 on rank 1"),
    "step": ({"step": 8}, "step 7 on rank 0 and step 8 on rank 1"),
    "step on the device": ({"step": torch.tensor([8])}, "step 7 on rank 0 and step 8 on rank 1"),
    "two": ({"k": 5, "step": -1}, "step 7, k 4 on rank 0 and step -1, k 5 on rank 1"),
}


@pytest.mark.parametrize("which", DISAGREEMENTS)
def test_ranks_that_disagree(which: str) -> None:
    """All of them raise, also in the next call, and nothing is written."""
    of_rank_1, said = DISAGREEMENTS[which]

    def work(group: dist.ProcessGroup) -> Any:
        mine: dict[str, Any] = {"k": 4, "rows": 2, "dtype": torch.float32, "ownership": "contiguous"}
        mine |= {"record": 64, "gather": False, "step": 7} | (of_rank_1 if group.rank() == 1 else {})
        shards = Shards(group, mine["ownership"], record=mine["record"])
        logits = torch.zeros(mine["rows"], 9, dtype=mine["dtype"])
        lengths = torch.full((mine["rows"],), 9, dtype=torch.int32)
        out = torch.full((mine["rows"], mine["k"]), POISON, dtype=torch.int32)
        for _ in range(2):
            with pytest.raises(
                ValueError,
                match=re.escape(f"gvr_topk.Shards: call: wanted the same on all ranks, got {said}"),
            ):
                sharded_topk(
                    logits,
                    lengths,
                    mine["k"],
                    shards=shards,
                    out=out,
                    gather=mine["gather"],
                    step=mine["step"],
                )
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
        try:
            sharded_topk(
                torch.randn(2, 50), torch.full((2,), 50, dtype=torch.int32), 9, shards=shards, step=step
            )
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
