"""Time exact top-k of rows on two GPUs beside other exact ways to it, over NCCL.

    python -m eval sharded --out out/sharded.json --baseline-dir FOLDER

Each figure is the time of one call, launched from a CUDA graph over several batches of scores that together
are larger than the L2 cache; of both ranks the slower one. ``local`` is the selection of each rank alone,
which all ways but the last start with. ``ours`` agrees in memory of both GPUs. ``vllm`` gathers the k best
of each rank in one buffer and merges them with vLLM's kernel (`eval.bench.vllm_merge`, which also says what
the folder holds); filtering out a rank's own is not in its time. ``collectives`` is ours without memory of
both GPUs, and ``one round`` the same with records of k words, which go round once. ``scores`` gathers whole
rows and selects in them. Every way's own positions are compared with what one GPU selects of the whole rows.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from eval.bench.sampling import cold_batches, microseconds
from eval.bench.vllm_merge import merge_of
from eval.common.machine import describe_machine, write_json
from eval.common.options import BaselineFolder, Commit, Out, require_gpu, require_writable
from eval.common.tables import markdown_table
from gvr_topk import indexer_topk_decode
from gvr_topk.distributed import Shards, sharded_topk

FORMAT = "gvr_topk.sharded/1"
WORLD = 2
INTERLEAVE = 64
WIDTHS = (131_072, 524_288)
ROWS = (1, 8, 64)
KS = (512, 2048)
NOTHING = torch.iinfo(torch.int32).max
VLLM = "vllm"
Way = Callable[[Shards, Tensor, Tensor, int], Tensor]


def own_of(positions: Tensor, shards: Shards) -> Tensor:
    """Filter positions of the row, -1 for none, and return those of this rank in its part, ascending."""
    turn = torch.div(positions, INTERLEAVE, rounding_mode="floor")
    local = torch.div(turn, shards.world, rounding_mode="floor") * INTERLEAVE + positions % INTERLEAVE
    mine = (positions >= 0) & (turn % shards.world == shards.rank)
    local = torch.sort(torch.where(mine, local, NOTHING), dim=1).values
    return torch.where(local < NOTHING, local, -1)


def ours(shards: Shards, scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    return sharded_topk(scores, lengths, k, shards=shards).local


def gathered_scores(shards: Shards, scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    parts = shards.exchange(scores).view(shards.world, len(scores), -1, INTERLEAVE)
    whole = parts.permute(1, 2, 0, 3).reshape(len(scores), -1)
    return own_of(indexer_topk_decode(whole, lengths * shards.world, k), shards)


WAYS: dict[str, Way] = {
    "local": lambda _, scores, lengths, k: indexer_topk_decode(scores, lengths, k),
    "ours": ours,
    "collectives": ours,
    "one round": ours,
    "scores": gathered_scores,
}


def measure(rows: int, width: int, k: int, ways: dict[str, Way]) -> dict[str, Any]:
    """Time and check every way, as one rank."""
    draw = torch.Generator("cuda").manual_seed(rows + width + dist.get_rank())
    batches = cold_batches(lambda: torch.randn(rows, width, device="cuda", generator=draw))
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    result: dict[str, Any] = {"rows": rows, "width": width, "k": k, "us": {}, "wrong": {}}
    for name, way in ways.items():
        record = k if name == "one round" else None
        shards = Shards(ownership=INTERLEAVE, device="cuda", record=record, peer_memory=name == "ours")
        if name == "ours" and shards.peers is None:
            raise RuntimeError("the GPUs cannot reach each other's memory")
        calls = [functools.partial(way, shards, scores, lengths, k) for scores in batches]
        slower = torch.tensor(microseconds(calls), device="cuda")
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        result["us"][name] = float(slower)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for call, scores in zip(calls if name != "local" else (), batches, strict=False):
            found = own_of(call(), shards) if name == VLLM else call()
            wrong += (found != gathered_scores(shards, scores, lengths, k)).any(1).sum()
        dist.all_reduce(wrong)
        torch.cuda.synchronize()
        shards.check()
        result["wrong"][name] = int(wrong)
    return result


def work(rank: int, folder: str, baseline_dir: Path | None) -> None:
    """Measure as one rank; rank 0 writes the results."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    ways = WAYS if baseline_dir is None else WAYS | {VLLM: merge_of(baseline_dir)}
    results = [measure(rows, width, k, ways) for k in KS for width in WIDTHS for rows in ROWS]
    if rank == 0:
        write_json(Path(folder) / "results.json", results)
    dist.destroy_process_group()


def main(
    out: Out = Path("out/sharded.json"), commit: Commit = "", baseline_dir: BaselineFolder = None
) -> int:
    """Time top-k of rows on two GPUs."""
    require_writable(out)
    require_gpu()
    if torch.cuda.device_count() < WORLD:
        raise typer.BadParameter(f"GPU: wanted {WORLD}, got {torch.cuda.device_count()}")
    # Multicast stays off, in NCCL and in symmetric memory.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, args=(folder, baseline_dir), nprocs=WORLD)
        results = json.loads((Path(folder) / "results.json").read_text())
    machine = describe_machine(commit)
    write_json(out, {"format": FORMAT, "machine": machine, "ranks": WORLD, "results": results})
    lines = [
        [*(str(each[name]) for name in ("k", "width", "rows")), *(f"{us:.1f}" for us in each["us"].values())]
        for each in results
    ]
    print(markdown_table(["k", "width", "rows", *(f"{name}, us" for name in results[0]["us"])], lines))
    wrong = sum(sum(each["wrong"].values()) for each in results)
    print(f"{wrong} of the checked rows are wrong")
    return int(wrong > 0)
