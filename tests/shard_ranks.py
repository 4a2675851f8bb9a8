"""Ranks for the tests of `gvr_topk.distributed`: threads of this process, or processes of their own.

Each thread has a gloo group of its own. Threads share what a test has changed, and import nothing again.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 10.0
ARGUMENT = "argument.pt"


def in_threads(world: int, work: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """Run `work` as every rank, rank 0 in this thread; an exception stands for the result of its rank."""
    store = dist.HashStore()
    results: list[Any] = [None] * world
    backends = []  # A rank that has nothing to do leaves its connections open: others may still open theirs.

    def run(rank: int) -> None:
        try:
            wait = datetime.timedelta(seconds=TIMEOUT_S)
            backend = dist.ProcessGroupGloo(store, rank, world, wait)
            backends.append(backend)
            group = dist.ProcessGroup(store, rank, world)
            kind = dist.ProcessGroup.BackendType.GLOO
            group._register_backend(torch.device("cpu"), kind, backend)
            results[rank] = work(group)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, world)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return results


def _process(rank: int, world: int, device: str, folder: Path, timeout_s: float, work: Any) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    argument = torch.load(folder / ARGUMENT, weights_only=False)
    torch.save(work(argument), folder / f"{rank}.pt")
    if device == "cuda":
        dist.destroy_process_group()


def start(
    world: int,
    folder: Path,
    work: Callable[[Any], Any],
    argument: Any,
    *,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Start a process for each rank, which saves what `work` returns in the folder."""
    # Forks of a server that has imported everything start at once; a GPU wants a process from the start.
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(["torch.distributed", "gvr_topk.distributed"])
    # A file, because each tensor that is passed takes a file descriptor, of which there may be 256.
    torch.save(argument, folder / ARGUMENT)
    arguments = [(rank, world, device, folder, timeout_s, work) for rank in range(world)]
    processes: list[Any] = [context.Process(target=_process, args=each) for each in arguments]
    for process in processes:
        process.start()
    return processes


def results(processes: Sequence[Any], folder: Path, seconds: float = 60) -> list[Any]:
    """Wait for processes and return what they have saved; None of one that has not."""
    for process in processes:
        process.join(seconds)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert hung == []
    saved = [folder / f"{rank}.pt" for rank in range(len(processes))]
    return [torch.load(file) if file.exists() else None for file in saved]
