"""Rows that vLLM's decode context parallelism spreads over ranks, each of which keeps its own of a choice."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sampler_setup import fail
from torch import Tensor
from torch.distributed import distributed_c10d
from vllm_engine import CHUNK, Runner, fake_vllm
from vllm_lines import LINE, logged

from gvr_topk import indexer_topk_decode
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.verify import Differs
from gvr_topk.integrations.vllm import dcp, plugin
from gvr_topk.integrations.vllm.dcp import DcpHook, MergeCall
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.upstream import INDEXER_MODULE
from tests import shard_ranks
from tests.shard_cases import share

ENABLE = "GVR_TOPK_VLLM_DCP"
OURS, OWN = ("gvr_topk", "dcp"), "original"
K, TURN = 16, 4
UNUSED = -7
Ranks = Callable[..., list[Any]]
"""Type of `ranks`."""


@pytest.fixture
def log(log: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(ENABLE, "1")
    return log


# ---------------------------------------------------------------- whole engines, a process for each rank


class Part(Runner):
    """A runner of one rank, whose caches hold its part of the scores, and garbage behind that."""

    def __init__(self, rank: int, world: int, turn: int, **options: Any) -> None:
        super().__init__(part=(rank, world, turn), specials=False, **options)
        self.whole: list[Tensor] = []
        self.owns = torch.arange(self.caches[0].kv_cache.shape[1]) // turn % world == rank

    def _scores(self, shape: torch.Size) -> Tensor:
        whole = super()._scores(shape)
        self.whole = [*self.whole, whole][-len(self.names) :]
        part = torch.full(shape, 7e33)
        part[:, : int(self.owns.sum())] = whole[:, self.owns]
        return part


def served(options: dict[str, Any]) -> dict[str, Any]:
    """Run some steps as one rank; what was chosen, the whole scores, lengths, counts and lines."""
    rank, world = dist.get_rank(), dist.get_world_size()
    monkeypatch, drafts = pytest.MonkeyPatch(), options.get("drafts", 0)
    chosen, whole, lengths = [], [], []
    with monkeypatch.context() as patch, fake_vllm(), logged() as lines:
        for name, value in options.pop("variables", {}).items():
            patch.setenv(name, value)
        for name, value in options.pop("of_rank_1", {}).items() if rank == 1 else ():
            patch.setenv(name, value)
        patch.setattr(dcp, "ALL_THERE", timedelta(seconds=options.pop("patience", 60)))
        integration.register()
        runner = Part(rank, world, options.pop("turn"), topk=K, seqs=6, width=420, **options)
        decode = [runner.add(name, length) for name, length in (("a", 400), ("b", 311), ("c", 5))]
        prompts = [runner.add(name, length) for name, length in (("d", 200), ("e", CHUNK), ("f", 83))]
        for pads, beside in ((0, []), (0, prompts), (3, []), (0, prompts[1:2])):
            with torch.inference_mode():
                step = runner.step(decode, beside, pads)
            ends = [each.length - drafts + row for each in decode for row in range(1 + drafts)]
            ends += [0] * (len(step.lengths) - len(ends))
            of_prompts = [each.length - CHUNK + 1 + row for each in beside for row in range(CHUNK)]
            for each, rows in ((step, ends), (step.prompts, of_prompts)):
                if each is not None:
                    first = 0 if each is step else len(ends)
                    chosen += each.chosen.values()
                    whole += [scores[first : first + len(rows)] for scores in runner.whole]
                    lengths += [torch.tensor(rows, dtype=torch.int32)] * len(runner.names)
        counts = plugin.counters().calls
        integration.unregister()
    return {"chosen": chosen, "whole": whole, "lengths": lengths, "calls": counts, "log": lines}


def in_processes(world: int, folder: Path, **options: Any) -> list[dict[str, Any]]:
    processes = shard_ranks.start(world, folder, served, options)
    found = shard_ranks.results(processes, folder)
    assert all(found)
    return found


def assert_chosen(found: Sequence[dict[str, Any]], turn: int, ours: bool) -> None:
    """Each rank has its share of the choice from whole rows, or all of that from vLLM itself."""
    assert len(found[0]["chosen"]) == 12
    for rank, each in enumerate(found):
        for got, whole, lengths in zip(each["chosen"], each["whole"], each["lengths"], strict=True):
            wanted = sorted_topk(whole, lengths, K)
            if ours:
                assert torch.equal(got, share(wanted, turn, len(found), rank)[0])
            else:
                assert torch.equal(got.sort(1).values, wanted.sort(1).values)


@pytest.mark.parametrize(
    ("world", "turn", "options"),
    [(2, 1, {}), (3, 4, {"drafts": 2}), (2, 16, {"flattening": True, "drafts": 1, "via_op": True})],
)
def test_processes_keep_their_own(tmp_path: Path, world: int, turn: int, options: dict[str, Any]) -> None:
    """Decode rows and prompts, of requests some of which have no keys on some ranks, and padding rows."""
    found = in_processes(world, tmp_path, turn=turn, variables={ENABLE: "1"}, **options)
    assert_chosen(found, turn, ours=True)
    for each in found:
        counted = {key: n for key, n in each["calls"].items() if key[1].startswith("dcp")}
        assert counted == {OURS: 14}  # two layers: four steps with decode rows, and three chunks of prompts
        said = [line for line in each["log"] if "agree" in line]
        assert said == [LINE + f"on: {world} ranks agree on the score of rank {K}"]


def test_processes_of_vllm_merge_until_asked_for(tmp_path: Path) -> None:
    found = in_processes(2, tmp_path, turn=4, variables={})
    assert_chosen(found, 4, ours=False)
    assert not any(key[1].startswith("dcp") for each in found for key in each["calls"])


@pytest.mark.parametrize("variable", [ENABLE, "GVR_TOPK_VLLM"])
def test_processes_without_the_hook(tmp_path: Path, variable: str) -> None:
    """The others wait for it, and then all leave the merge to vLLM."""
    found = in_processes(
        2, tmp_path, turn=4, variables={ENABLE: "1"}, of_rank_1={variable: "0"}, patience=0.5
    )
    assert_chosen(found, 4, ours=False)
    assert {key for key in found[0]["calls"] if "dcp" in key[1]} == {(OWN, "dcp not agreed")}
    assert LINE + "not in use: merge of ranks: another rank cannot" in found[0]["log"]


def test_processes_that_verify(tmp_path: Path) -> None:
    found = in_processes(2, tmp_path, turn=4, variables={ENABLE: "1", "GVR_TOPK_VERIFY": "3"}, drafts=1)
    assert_chosen(found, 4, ours=True)
    for each in found:
        assert LINE + "verified 3 calls of merge of ranks" in each["log"]


# ---------------------------------------------------------------- the hook alone, a thread for each rank


class Rank:
    """The hook of one rank, around the fake's merge."""

    here = threading.local()

    def __init__(self, group: dist.ProcessGroup, mode: Mode = Mode.ON, started: bool = True) -> None:
        self.group, self.lines = group, list[str]()
        self.rank, self.world_size, self.rank_in_group = group.rank(), group.size(), group.rank()
        self.cpu_group = group
        self.metrics = CallMetrics(lambda level, line: None)
        self.hook = DcpHook(mode, self.metrics, lambda level, line: self.lines.append(f"{level} {line}"))
        self.here.rank = self
        self.merge = self.hook.wrap(importlib.import_module(INDEXER_MODULE)._merge_dcp_topk_global)
        kernels = SimpleNamespace(sparse_indexer_topk_backend="auto")
        config = SimpleNamespace(kernel_config=kernels, model_config=SimpleNamespace(max_model_len=420))
        self.builder = SimpleNamespace(
            dcp_world_size=self.world_size,
            cp_kv_cache_interleave_size=TURN,
            device=torch.device("cpu"),
            vllm_config=config,
        )
        if started:
            self.hook.note_builder(self.builder)

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        self.group.allgather([parts], [part]).wait()
        return torch.cat(parts, dim)

    def part(self, whole: Tensor) -> Tensor:
        return whole[:, torch.arange(whole.shape[1]) // TURN % self.world_size == self.rank]

    def call(self, logits: Tensor, lengths: Tensor, k: int = K, **changes: Any) -> Tensor:
        """Merge a selection from a part; columns behind the k of a row have to stay."""
        buffer = torch.full((len(logits), k + 2), UNUSED, dtype=torch.int32)
        buffer[:, :k] = indexer_topk_decode(logits, lengths, k)
        ranks = {"dcp_rank": self.rank, "dcp_world_size": self.world_size, "cp_interleave": TURN}
        given = ranks | changes
        self.merge(logits, buffer[:, :k], k, *(given.pop(name) for name in ranks), **given)
        assert bool((buffer[:, k:] == UNUSED).all())
        return buffer[:, :k]

    def select(self, whole: Tensor, k: int = K) -> Tensor:
        """Select from a part of whole rows, and merge."""
        return self.call(self.part(whole), self.lengths(whole), k)

    def served(self, whole: Tensor, k: int = K) -> bool:
        """Whether a selection is our own part of the whole one; else it has to be vLLM's whole one."""
        got, wanted = self.select(whole, k), self.wanted(whole, k)
        if torch.equal(got, share(wanted, TURN, self.world_size, self.rank)[0]):
            return True
        assert torch.equal(got.sort(1).values, wanted.sort(1).values)
        return False

    def lengths(self, whole: Tensor) -> Tensor:
        return torch.full((len(whole),), self.part(whole).shape[1], dtype=torch.int32)

    def wanted(self, whole: Tensor, k: int = K) -> Tensor:
        length = torch.full((len(whole),), whole.shape[1], dtype=torch.int32)
        return sorted_topk(whole, length, k)

    def calls(self) -> dict[tuple[str, str], int]:
        return self.metrics.counters.snapshot().calls


@pytest.fixture
def ranks(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Runs what it is given as two ranks, or as many as it says."""
    for name in (INDEXER_MODULE, "vllm.distributed"):
        monkeypatch.setattr(importlib.import_module(name), "get_dcp_group", lambda: Rank.here.rank)

    def run(work: Callable[[Rank], Any], world: int = 2, **options: Any) -> list[Any]:
        store = dist.HashStore()
        monkeypatch.setattr(distributed_c10d, "_get_process_group_store", lambda group: store)
        found = shard_ranks.in_threads(world, lambda group: work(Rank(group, **options)))
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found

    return run


def rows(count: int = 5, width: int = 160, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, width, generator=draw)).round()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("k", [1, K, 200])
def test_merges(ranks: Ranks, world: int, k: int) -> None:
    """Of any number of rows, one after the other, and of ranks some of which have no column."""

    def work(rank: Rank) -> Any:
        rank.hook.note_builder(rank.builder)
        for seed, (count, width) in enumerate(((2, 160), (7, 160), (3, 3), (1, 91), (7, 420))):
            assert rank.served(rows(count, width, seed), k)
        assert rank.calls() == {OURS: 5}
        return rank.lines

    said = [f"info on: {world} ranks agree on the score of rank {k}"]
    assert ranks(work, world) == [said] * world


def test_calls_before_the_first_step_and_of_one_rank(ranks: Ranks) -> None:
    whole = rows()

    def work(rank: Rank) -> Any:
        one = SimpleNamespace(**vars(rank.builder) | {"dcp_world_size": 1})
        rank.hook.note_builder(one)
        rank.hook.note_builder(SimpleNamespace())  # of another kind
        assert not rank.served(whole)
        assert rank.calls() == {(OWN, "dcp of one rank"): 1}
        rank.hook.note_builder(rank.builder)
        assert rank.served(whole)
        return rank.calls()[OURS]

    assert ranks(work, started=False) == [1, 1]


def test_nothing_is_settled_in_a_capture(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "capturing", lambda device: True)

    assert ranks(lambda rank: rank.hook._shards) == [None, None]


CANNOT: dict[str, tuple[Callable[[Rank], Any], str]] = {
    "backend": (
        lambda rank: setattr(rank.builder.vllm_config.kernel_config, "sparse_indexer_topk_backend", "torch"),
        "another backend was chosen",
    ),
    "microbatches": (
        lambda rank: setattr(
            rank.builder.vllm_config, "parallel_config", SimpleNamespace(use_ubatching=True)
        ),
        "microbatches run beside each other",
    ),
    "longest": (
        lambda rank: setattr(rank.builder.vllm_config.model_config, "max_model_len", (1 << 21) + 1),
        "rows of 2097153 tokens",
    ),
    "error": (
        lambda rank: delattr(rank.builder, "cp_kv_cache_interleave_size"),
        "AttributeError: 'types.SimpleNamespace' object has no attribute 'cp_kv_cache_interleave_size'",
    ),
    "configuration": (
        lambda rank: delattr(rank.builder, "vllm_config"),
        "AttributeError: 'types.SimpleNamespace' object has no attribute 'vllm_config'",
    ),
}


@pytest.mark.parametrize("which", CANNOT)
@pytest.mark.parametrize("alone", [True, False])
def test_ranks_that_cannot(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, which: str, alone: bool) -> None:
    """Whether one cannot or all: vLLM merges everywhere, and the lines say why."""
    monkeypatch.setattr(dcp, "ALL_THERE", timedelta(seconds=0.5))
    change, why = CANNOT[which]
    whole = rows()

    def work(rank: Rank) -> Any:
        cannot = rank.rank == 1 or not alone
        if cannot:
            change(rank)
        for _ in range(2):
            rank.hook.note_builder(rank.builder)
            assert not rank.served(whole)
        assert rank.calls() == {(OWN, "dcp not agreed"): 2}
        reason = why if cannot else "another rank cannot"
        assert rank.lines[-1] == f"info not in use: merge of ranks: {reason}"
        assert len(rank.lines) == 1 + (reason == "another backend was chosen")
        return True

    assert ranks(work, started=False) == [True, True]


def test_the_longest_row_and_a_chosen_backend_under_force(ranks: Ranks) -> None:
    def work(rank: Rank) -> Any:
        rank.builder.vllm_config.model_config.max_model_len = 1 << 21
        rank.builder.vllm_config.kernel_config.sparse_indexer_topk_backend = "torch"
        rank.builder.vllm_config.parallel_config = SimpleNamespace(use_ubatching=False)
        rank.hook.note_builder(rank.builder)
        return rank.hook._shards is not None

    assert ranks(work, mode=Mode.FORCE, started=False) == [True, True]


def test_gpus_that_cannot_reach_each_other(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def shards(*given: Any, **options: Any) -> Any:
        made.append((given[1:], options))
        return SimpleNamespace(peers=None, device=torch.device("cuda", 0))

    monkeypatch.setattr(dcp, "Shards", shards)

    line = "info not in use: merge of ranks: the GPUs cannot reach each other's memory"
    assert ranks(lambda rank: rank.lines) == [[line]] * 2
    assert made == [((TURN, torch.device("cpu")), {"timeout_s": 600.0})] * 2


def test_what_is_left_to_vllm(ranks: Ranks) -> None:
    """By what is the same on all ranks; the width of a rank's scores is not."""
    whole = rows()

    def work(rank: Rank) -> Any:
        logits, lengths = rank.part(whole), rank.lengths(whole)
        starts = torch.zeros(len(whole), dtype=torch.int32)
        got = rank.call(logits, lengths, row_starts=starts)
        assert torch.equal(got.sort(1).values, rank.wanted(whole).sort(1).values)
        rank.call(logits, lengths, dcp_world_size=1)
        rank.call(logits, lengths, dcp_rank=rank.rank, cp_interleave=TURN + 1)
        rank.call(logits.bfloat16(), lengths)
        for k in (2049, 5000):
            rank.call(logits, lengths, k=k)
        rank.call(logits[:1].expand(129, -1), lengths[:1].expand(129).contiguous())
        assert rank.served(whole, 2048) and rank.served(rows(128))
        call = MergeCall(logits, lengths, K, rank.rank, 2, TURN)
        assert rank.hook.reason_against(call._replace(dcp_rank=1 - rank.rank)) == "of other ranks"
        assert rank.hook.reason_against(call._replace(dcp_world_size=3)) == "of other ranks"
        assert rank.hook.reason_against(call._replace(logits=logits[:, :0])) == ""
        return rank.calls()

    reasons = {"of windows": 1, "of other ranks": 2, "layout": 1, "of a large k": 2, "of many rows": 1}
    counted = {(OWN, f"dcp {reason}"): n for reason, n in reasons.items()} | {OURS: 2}
    assert ranks(work) == [counted] * 2


def test_an_error_ends_the_engine(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the other ranks wait for this one where they are."""
    whole = rows()
    monkeypatch.setattr(dcp, "sharded_topk", lambda *given, **options: fail(given))

    def work(rank: Rank) -> Any:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no room"):
                rank.select(whole)
        rank.hook._shards = SimpleNamespace(check=lambda: fail(rank))  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="no room"):
            rank.hook.note_builder(rank.builder)
        return rank.calls()

    assert ranks(work) == [{}, {}]


@pytest.mark.parametrize("calls", [1, 2])
def test_verify_agrees(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """With NaN, zeros of both signs, -inf, rows of fewer scores than k, and a rank without columns."""
    monkeypatch.setenv("GVR_TOPK_VERIFY", str(calls))

    def work(rank: Rank) -> Any:
        whole = rows(6)
        whole[0, 3] = torch.nan
        whole[1] = torch.where(torch.arange(160) % 3 == 0, -0.0, 0.0)
        whole[2, 10:] = -torch.inf
        for each in (rows(2, TURN), rows(2, K - 1), whole, whole, whole):
            assert rank.served(each)
        assert rank.calls() == {OURS: 5}
        return [line for line in rank.lines if "verified" in line]

    assert ranks(work) == [[f"info verified {calls} calls of merge of ranks"]] * 2


FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "another score": lambda chosen: chosen[2, 0].fill_(0),
    "one less": lambda chosen: chosen[2, 0].fill_(-1),
    "twice": lambda chosen: chosen[2, 1].copy_(chosen[2, 0]),
    "outside": lambda chosen: chosen[2, 0].fill_(160),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_sees_what_differs(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """On one rank; and then all leave the merge to vLLM, this call's too."""
    monkeypatch.setenv("GVR_TOPK_VERIFY", "3")
    right = dcp.sharded_topk
    whole = rows()
    whole[2] = torch.arange(160.0).flip(0)
    whole[2, 0] = 40.0

    def wrong(*given: Any, **options: Any) -> Any:
        found = right(*given, **options)
        if options["shards"].rank == 0:
            FAULTS[fault](options["out"])
        return found

    monkeypatch.setattr(dcp, "sharded_topk", wrong)

    def work(rank: Rank) -> Any:
        for _ in range(2):
            assert not rank.served(whole)
        return rank.calls(), rank.lines

    counted = {(OWN, "dcp error: Differs"): 2}
    line = "warning fell back: merge of ranks: Differs: row 2 of 5: the ranks have chosen other scores"
    assert ranks(work) == [(counted, [f"{line}. vLLM's own merge of ranks serves from now on"])] * 2


@pytest.mark.parametrize("alone", [False, True])
def test_a_merge_of_vllm_that_fails_is_not_compared(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """On all ranks, also where it failed on one of them alone."""
    monkeypatch.setenv("GVR_TOPK_VERIFY", "3")
    whole = rows()

    def work(rank: Rank) -> Any:
        def fail(*given: Any, **options: Any) -> None:
            given[1].fill_(UNUSED)
            if not alone or rank.hook._shards.rank == 1:
                raise RuntimeError("no CuTe DSL")

        rank.merge = rank.hook.wrap(fail)
        for _ in range(2):
            assert rank.served(whole)
        return rank.lines[0]

    said = "warning not verified: vLLM's own merge of ranks: RuntimeError: "
    other = "another rank could not" if alone else "no CuTe DSL"
    assert ranks(work) == [said + other, said + "no CuTe DSL"]


def test_what_ranks_have_chosen_is_compared_by_scores(ranks: Ranks) -> None:
    def work(rank: Rank) -> Any:
        shards = rank.hook._shards
        assert shards is not None
        part = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])  # positions 0 to 3 and 8, or 4 to 7 and 12
        first, second = torch.tensor([[0, 5, 8, -1]]), torch.tensor([[12, 5, 0, -1]])
        got = dcp._own_scores(shards, part, first)
        inf = -torch.inf
        assert got.tolist() == [[inf, inf, 5.0, 1.0, 2.0] if rank.rank == 0 else [inf, inf, inf, 4.0, 1.0]]
        assert dcp._own_scores(shards, part[:, :0], -torch.ones_like(first)).tolist() == [[inf] * 4 + [0.0]]
        assert dcp._own_scores(shards, part[:, :0], first)[0, -1] == -1
        assert dcp._agree(shards, part, first, second) is False  # of fewer items than k
        assert dcp._agree(shards, part, first[:, :3], second[:, :3]) is True
        with pytest.raises(Differs, match="row 0 of 1"):
            dcp._agree(shards, part, first[:, :3], torch.tensor([[0, 5, 1]]))
        return True

    assert ranks(work) == [True, True]


def test_who_is_not_heard_of_is_not_able(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is settled stays, for one who comes late, too; each question has its own answer."""
    monkeypatch.setattr(dcp, "ALL_THERE", timedelta(seconds=0.3))
    late = threading.Event()

    def work(rank: Rank) -> Any:
        assert dcp.all_say(rank.group, "first", True)
        assert not dcp.all_say(rank.group, "second", rank.rank == 0)
        if rank.rank == 1:
            late.wait()
        found = dcp.all_say(rank.group, "third", True)
        late.set()
        return found

    assert ranks(work) == [False, False]
