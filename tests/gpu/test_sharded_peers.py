"""Rows in parts on several ranks that share memory: all ranks on one GPU, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from gvr_topk import indexer_topk_decode
from gvr_topk.constants import PEER_CTAS, PEER_RANKS
from gvr_topk.distributed.peers import INBOX_WORDS, Peers
from gvr_topk.ops import launch
from tests.shard_cases import DTYPES, INF, NAN, POISON, expected, share, some_case
from tests.wrong_calls import sharded_arguments

HEADER = 5, 6
TURN = 64
K = 2048


class Ranks:
    """All ranks of a row, with their memory."""

    def __init__(self, world: int, timeout_s: float = 20.0) -> None:
        device = torch.device("cuda", 0)
        self.inboxes = [torch.zeros(INBOX_WORDS, dtype=torch.int64, device=device) for _ in range(world)]
        addresses = [inbox.data_ptr() for inbox in self.inboxes]
        self.peers = [Peers(rank, addresses, device, timeout_s) for rank in range(world)]
        self.streams = [torch.cuda.Stream() for _ in range(world)]

    def results(self, rows: int, k: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Allocate what each rank writes, poisoned, with two columns that it may not write."""
        wide = torch.full((rows, k + 2), POISON, dtype=torch.int32, device="cuda")
        return [(wide.clone(), wide.clone(), wide[:, 0].clone()) for _ in self.peers]

    def choose(
        self,
        parts: Sequence[Tensor],
        lengths: Sequence[Tensor],
        k: int,
        ownership: str | int,
        best: Sequence[Tensor] | None = None,
        headers: Sequence[tuple[int, int]] | None = None,
        step: int | Tensor = 0,
        found: list[tuple[Tensor, Tensor, Tensor]] | None = None,
        late: int = 0,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Run one call as every rank for which there is a part; all but rank 0 begin `late` cycles later."""
        interleave = 0 if isinstance(ownership, str) else ownership
        best = best or [
            indexer_topk_decode(part, length, k) for part, length in zip(parts, lengths, strict=True)
        ]
        found = found or self.results(len(parts[0]), k)
        # Code is loaded and memory allocated before a kernel waits for one that is not launched yet.
        torch.cuda.synchronize()
        for rank, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            header = HEADER if headers is None else headers[rank]
            with torch.cuda.stream(self.streams[rank]):
                if rank and late:
                    torch.cuda._sleep(late)
                launch(
                    self.peers[rank].arguments(
                        part, length, best[rank], found[rank], k, interleave, header, step
                    )
                )
        torch.cuda.synchronize()
        return found


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """Load the kernels, which waits for everything on the GPU, also for a rank that waits for another."""
    torch.cuda._sleep(1)
    part, length = torch.ones(1, 8, device="cuda"), torch.full((1,), 8, dtype=torch.int32, device="cuda")
    Ranks(1).choose([part], [length], 4, "contiguous")


def on_gpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def compare(ranks: Ranks, found: Sequence[Sequence[Tensor]], whole: Tensor, length: int, k: int) -> None:
    """Compare with one GPU; no column behind is written, and the ranks have heard of each other."""
    for rank, got in enumerate(found):
        for name, a, b in zip(
            ("out", "local", "counts"), got, wanted(whole, length, k, len(found), rank), strict=True
        ):
            assert torch.equal(a[:, :k] if a.dim() == 2 else a, b), (rank, name)
        assert all(bool((each[:, k:] == POISON).all()) for each in got[:2])
    heard(ranks)


def heard(ranks: Ranks) -> None:
    for peers in ranks.peers:
        heads, late = peers.heard()
        assert not np.any(heads) and late == ""


def run_random(world: int, calls: int) -> None:
    rng, ranks = np.random.default_rng(world), Ranks(world)
    for _ in range(calls):
        case = some_case(rng, world) | {"gather": False}
        found = ranks.choose(on_gpu(case["parts"]), on_gpu(case["lengths"]), case["k"], case["ownership"])
        for rank, got in enumerate(found):
            same = [torch.equal(a.cpu(), b) for a, b in zip(got, expected(case, rank), strict=True)]
            assert all(same), (rank, case)
    heard(ranks)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, PEER_RANKS])
def test_random_calls(world: int) -> None:
    run_random(world, 60)


@pytest.mark.sanitizer
@pytest.mark.parametrize("world", [1, 2])
def test_small_calls(world: int) -> None:
    run_random(world, 3)


def whole_rows(kind: str, rows: int, width: int, draw: torch.Generator) -> Tensor:
    whole = torch.randn(rows, width, device="cuda", generator=draw)
    if kind == "tied":
        whole = whole.round()
    elif kind == "equal":
        whole.fill_(-3.5)
    elif kind == "masked":
        whole[torch.rand(whole.shape, device="cuda", generator=draw) < 0.97] = -INF
    elif kind == "two values":
        whole = (whole > 1.7).float()
    elif kind == "narrow":
        whole = 1 + whole.abs().clamp(max=4) * 2**-21
    elif kind == "wide":
        whole = whole.sign() * torch.exp(20 * whole.abs())
    elif kind == "odd":
        values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e-40, 1.0], device="cuda")
        whole = values[torch.randint(7, whole.shape, device="cuda", generator=draw)]
    elif kind == "one rank":
        whole[:, ::TURN] += 100
    return whole


def wanted(whole: Tensor, length: int, k: int, world: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Share of a rank in what one GPU chooses of whole rows, whose positions go to the ranks in turn."""
    best = indexer_topk_decode(whole, torch.full((len(whole),), length, dtype=torch.int32, device="cuda"), k)
    return share(best, TURN, world, rank)


def parts_of(whole: Tensor, length: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    owner = torch.arange(whole.shape[1], device="cuda") // TURN % world
    lengths = [
        torch.full((len(whole),), int((owner[:length] == rank).sum()), dtype=torch.int32, device="cuda")
        for rank in range(world)
    ]
    return [whole[:, owner == rank].contiguous() for rank in range(world)], lengths


KINDS = ["usual", "tied", "equal", "masked", "two values", "narrow", "wide", "odd", "one rank"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_long_rows(world: int, kind: str) -> None:
    draw, ranks = torch.Generator("cuda").manual_seed(world), Ranks(world)
    for turn, (rows, width, k) in enumerate([(3, 65_536, K), (8, 20_000, 512), (1, 131_072, K), (2, 900, K)]):
        whole = whole_rows(kind, rows, width, draw).to(DTYPES[turn % 3])
        length = width - 77 * turn
        found = ranks.choose(*parts_of(whole, length, world), k, TURN)
        compare(ranks, found, whole, length, k)


@pytest.mark.parametrize("rows", [PEER_CTAS - 1, PEER_CTAS + 1, 5 * PEER_CTAS])
def test_many_rows(rows: int) -> None:
    draw, ranks = torch.Generator("cuda").manual_seed(rows), Ranks(2)
    whole = whole_rows("usual", rows, 4096, draw)
    compare(ranks, ranks.choose(*parts_of(whole, 4000, 2), 500, TURN), whole, 4000, 500)


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_whose_rows_and_step_change(world: int) -> None:
    draw, ranks = torch.Generator("cuda").manual_seed(world), Ranks(world)
    rows, width = 4, 30_000
    whole = whole_rows("usual", rows, width, draw)
    parts, lengths = parts_of(whole, width, world)
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    found, graphs = ranks.results(rows, K), []
    for rank in range(world):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank], stream=ranks.streams[rank]):
            best = indexer_topk_decode(parts[rank], lengths[rank], K)
            launch(
                ranks.peers[rank].arguments(
                    parts[rank], lengths[rank], best, found[rank], K, TURN, HEADER, step
                )
            )
    for turn in range(200):
        length = width - 101 * turn
        whole = whole_rows(KINDS[turn % len(KINDS)], rows, width, draw)
        new_parts, new_lengths = parts_of(whole, length, world)
        for old, new in zip(parts + lengths, new_parts + new_lengths, strict=True):
            old.copy_(new)
        step.fill_(turn)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        compare(ranks, found, whole, length, K)


@pytest.mark.parametrize("rows", [3, 5 * PEER_CTAS])
def test_results_in_the_place_of_what_was_selected(rows: int) -> None:
    """What was selected is in any order, with -1 in between, and results are in that order."""
    draw, ranks = torch.Generator("cuda").manual_seed(rows), Ranks(2)
    whole, length = whole_rows("tied", rows, 9000, draw), 3000
    parts, lengths = parts_of(whole, length, 2)
    order = torch.randperm(K, device="cuda", generator=draw)
    best = [indexer_topk_decode(*each, K)[:, order] for each in zip(parts, lengths, strict=True)]
    assert all(bool((each == -1).any()) for each in best)
    found = ranks.results(rows, K)
    for each, (out, _, _) in zip(best, found, strict=True):
        out[:, :K] = each
    ranks.choose(parts, lengths, K, TURN, [out[:, :K] for out, _, _ in found], found=found)
    for rank, (out, local, counts) in enumerate(found):
        shares = wanted(whole, length, K, 2, rank)
        assert torch.equal(counts, shares[2])
        for got, share_of_rank in zip((out, local), shares, strict=False):
            assert torch.equal(got[:, :K].sort(1).values, share_of_rank.sort(1).values)
            assert bool((got[:, K:] == POISON).all())
        for row in range(3):
            kept = best[rank][row][torch.isin(best[rank][row], shares[1][row]) & (best[rank][row] >= 0)]
            assert torch.equal(local[row, : int(counts[row])], kept)
    heard(ranks)


def ordinary(world: int, rows: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator("cuda").manual_seed(1)
    return parts_of(whole_rows("usual", rows, 4096, draw), 4096, world)


def test_numbers_of_exchanges_begin_again() -> None:
    ranks = Ranks(2)
    first = ranks.choose(*ordinary(2), K, TURN)
    few = ranks.choose(*ordinary(2), 9, TURN)
    for peers in ranks.peers:
        peers._progress.fill_(-6)  # two exchanges before the last number
    for turn in range(6):
        again = ranks.choose(*ordinary(2), 9 if turn else K, TURN)
        assert all(
            torch.equal(a, b)
            for one, other in zip(few if turn else first, again, strict=True)
            for a, b in zip(one, other, strict=True)
        )
    heard(ranks)
    for inbox in ranks.inboxes:
        assert bool(((inbox >> 32 >= 0) & (inbox >> 32 < 6)).all())  # none is left from before


def test_numbers_of_the_lap_before_are_not_taken() -> None:
    ranks = Ranks(2)
    parts, lengths = ordinary(2)
    other = [-part for part in parts]
    right = ranks.choose(other, lengths, K, TURN)
    ranks = Ranks(2)
    for k in (K, 9, 9, 9):  # 1 leaves numbers that no later exchange overwrites
        ranks.choose(parts, lengths, k, TURN)
    for peers in ranks.peers:
        peers._progress.fill_(-6)
    for _ in range(2):
        ranks.choose(parts, lengths, 9, TURN)
    again = ranks.choose(other, lengths, K, TURN, late=1_000_000)
    for one, two in zip(right, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def nothing(found: tuple[Tensor, Tensor, Tensor], k: int) -> bool:
    return bool((found[0][:, :k] == -1).all() and (found[1][:, :k] == -1).all() and (found[2] == 0).all())


@pytest.mark.parametrize("word", [0, 1, 2])
def test_ranks_that_disagree_select_nothing(word: int) -> None:
    ranks = Ranks(3)
    headers = [(5, 6), (5 + (word == 0), 6 + (word == 1)), (5, 6)]
    steps = torch.arange(3, device="cuda") if word == 2 else torch.zeros(3, dtype=torch.int64, device="cuda")
    parts, lengths = ordinary(3)
    best = [indexer_topk_decode(part, length, 9) for part, length in zip(parts, lengths, strict=True)]
    found = ranks.results(3, 9)
    torch.cuda.synchronize()
    for rank, peers in enumerate(ranks.peers):
        with torch.cuda.stream(ranks.streams[rank]):
            launch(
                peers.arguments(
                    parts[rank], lengths[rank], best[rank], found[rank], 9, TURN, headers[rank], steps[rank]
                )
            )
    torch.cuda.synchronize()
    for each, peers in zip(found, ranks.peers, strict=True):
        assert nothing(each, 9)
        assert peers.heard() == (
            [[*header, int(step)] for header, step in zip(headers, steps, strict=True)],
            "",
        )
    again = ranks.choose(parts, lengths, 9, TURN)  # memory is in order, and the call is right
    assert not nothing(again[0], 9)


@pytest.mark.parametrize("rows", [(70, 200), (200, 129), (3, 5)])
def test_ranks_with_different_numbers_of_rows(rows: tuple[int, int]) -> None:
    """Common CTAs stay in step; CTAs that one rank has alone wait for the timeout."""
    ranks = Ranks(2, timeout_s=0.3)
    parts, lengths = zip(*((ordinary(1, n)[0][0], ordinary(1, n)[1][0]) for n in rows), strict=True)
    best = [indexer_topk_decode(part, length, 9) for part, length in zip(parts, lengths, strict=True)]
    found = [ranks.results(n, 9)[0] for n in rows]
    torch.cuda.synchronize()
    for rank, peers in enumerate(ranks.peers):
        given = parts[rank], lengths[rank], best[rank], found[rank]
        with torch.cuda.stream(ranks.streams[rank]):
            launch(peers.arguments(*given, 9, TURN, (5, rank), 0))
    torch.cuda.synchronize()
    assert all(nothing(each, 9) for each in found)
    heads, late = zip(*(peers.heard() for peers in ranks.peers), strict=True)
    assert list(heads) == [[[5, 0, 0], [5, 1, 0]]] * 2
    assert [each != "" for each in late] == [False, min(rows) < PEER_CTAS]


def test_ranks_with_different_numbers_of_keys() -> None:
    """Records of other lengths end the call without a timeout, and the next call is right."""
    ranks = Ranks(2)
    parts, lengths = ordinary(2)
    found = ranks.results(3, K)
    best = [indexer_topk_decode(part, length, K) for part, length in zip(parts, lengths, strict=True)]
    torch.cuda.synchronize()
    for rank, (peers, k) in enumerate(zip(ranks.peers, (9, K), strict=True)):
        with torch.cuda.stream(ranks.streams[rank]):
            launch(
                peers.arguments(parts[rank], lengths[rank], best[rank], found[rank], k, TURN, (5, rank), 0)
            )
    torch.cuda.synchronize()
    for each, peers, k in zip(found, ranks.peers, (9, K), strict=True):
        assert nothing(each, k) and peers.heard() == ([[5, 0, 0], [5, 1, 0]], "")
    assert not nothing(ranks.choose(parts, lengths, K, TURN)[0], K)


def test_a_rank_that_is_late_ends_the_call_and_all_later_ones() -> None:
    ranks = Ranks(2, timeout_s=0.2)
    parts, lengths = ordinary(2)
    assert nothing(ranks.choose(parts[:1], lengths[:1], K, TURN)[0], K)
    wanted = "gvr_topk.Shards: rank 1 was not heard of within 0.2 s; all ranks have to make their Shards anew"
    assert ranks.peers[0].heard()[1] == wanted
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        assert nothing(ranks.choose(parts[:1], lengths[:1], K, TURN)[0], K)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 2000  # no call waits again


def test_two_calls_at_once_end_in_an_error() -> None:
    ranks = Ranks(2, timeout_s=0.3)
    parts, lengths = ordinary(2)
    best = indexer_topk_decode(parts[0], lengths[0], K)
    found = ranks.results(3, K)
    torch.cuda.synchronize()
    for stream, results in zip(ranks.streams, found, strict=True):
        with torch.cuda.stream(stream):
            given = parts[0], lengths[0], best, results
            launch(ranks.peers[0].arguments(*given, K, TURN, HEADER, 0))
    torch.cuda.synchronize()
    assert nothing(found[0], K) and nothing(found[1], K)
    wanted = "two calls ran at once, on two streams; all ranks have to make their Shards anew"
    assert ranks.peers[0].heard()[1] == f"gvr_topk.Shards: {wanted}"
    assert nothing(ranks.choose(parts[:1], lengths[:1], K, TURN)[0], K)


def test_any_content_of_memory_writes_only_results() -> None:
    """Positions, lengths and memory of ranks that hold anything end a call, and nothing else is written."""
    rng = torch.Generator("cuda").manual_seed(3)
    for turn in range(40):
        ranks = Ranks(2, timeout_s=0.01)
        parts, lengths = ordinary(2)
        low, high = (-(2**31), 2**31) if turn % 2 else (-5, 3000)
        best = [
            torch.randint(low, high, (3, K), dtype=torch.int32, device="cuda", generator=rng)
            for _ in range(2)
        ]
        if turn % 4 > 1:
            for peers, inbox in zip(ranks.peers, ranks.inboxes, strict=True):
                peers._progress.fill_(turn)
                numbers = torch.randint(turn, turn + 5, inbox.shape, device="cuda", generator=rng)
                inbox.copy_(numbers << 32 | torch.randint(2**32, inbox.shape, device="cuda", generator=rng))
        found = ranks.choose(parts, lengths, K, TURN, best=best)
        for got in found:
            assert bool((got[0][:, K:] == POISON).all() and (got[1][:, K:] == POISON).all())
            assert bool(((got[1][:, :K] >= -1) & (got[1][:, :K] < 2048)).all())


def test_what_the_host_reads_lies_where_it_can() -> None:
    call = sharded_arguments("cuda", {})
    with pytest.raises(
        ValueError, match=r"sharded_topk: inboxes: wanted a tensor on cpu, got one on another device$"
    ):
        launch(call._replace(inboxes=call.inboxes.cuda(), told=call.told.cuda()))
    with pytest.raises(
        ValueError, match=r"^gvr_topk\.sharded_topk: told: wanted pinned memory, got other memory$"
    ):
        launch(call)
