"""Ranks for the tests of `gvr_topk.distributed`, and the choice of the whole row by a sort.

Ranks are threads of this process, each with a gloo group of its own, or processes. Threads share what a test
has changed, and need no second import.
"""

from __future__ import annotations

import datetime
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk.evaluation.oracle import sorted_row

TIMEOUT_S = 20.0


def in_threads(world: int, work: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """Run `work` as every rank, rank 0 in this thread; an exception stands for the result of its rank."""
    store = dist.HashStore()
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            wait = datetime.timedelta(seconds=TIMEOUT_S)
            backend = dist.ProcessGroupGloo(store, rank, world, wait)
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


def _process(rank: int, world: int, folder: Path, timeout_s: float, work: Any, argument: Any) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    torch.save(work(argument), folder / f"{rank}.pt")
    if backend == "nccl":
        dist.destroy_process_group()


def start(
    world: int, folder: Path, work: Callable[[Any], Any], argument: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Start a process for each rank, which saves what `work` returns in the folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "gvr_topk.distributed"])
    arguments = [(rank, world, folder, timeout_s, work, argument) for rank in range(world)]
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


def places(rank: int, lengths: Sequence[int], ownership: str | int) -> np.ndarray[Any, Any]:
    """Positions in the row of the visible part of a rank, of parts of these lengths."""
    j = np.arange(lengths[rank])
    if isinstance(ownership, str):
        return j + sum(lengths[:rank])
    return (j // ownership) * len(lengths) * ownership + rank * ownership + j % ownership


def chosen(
    parts: Sequence[Tensor], lengths: Sequence[Tensor], k: int, ownership: str | int
) -> list[list[tuple[list[int], list[int]]]]:
    """Choose from whole rows by a sort.

    Returns
    -------
    list
        For each row and rank, the positions in the row and in the part that are chosen, ascending.
    """
    found = []
    for row in range(len(parts[0])):
        visible = [
            min(max(int(length[row]), 0), part.shape[1]) for part, length in zip(parts, lengths, strict=True)
        ]
        where = [places(rank, visible, ownership) for rank in range(len(parts))]
        scores = [part[row, :n].float().numpy() for part, n in zip(parts, visible, strict=True)]
        at = np.concatenate(where)
        by_position = np.argsort(at)
        best = set(at[by_position][sorted_row(np.concatenate(scores)[by_position], k)].tolist())
        of_row = []
        for each in where:
            mine = [(int(position), j) for j, position in enumerate(each.tolist()) if position in best]
            of_row.append(([position for position, _ in mine], [j for _, j in mine]))
        found.append(of_row)
    return found
