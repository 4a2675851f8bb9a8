"""Timing of one kernel call inside a CUDA graph, cold or warm, on rows with a chosen hit ratio.

A graph holds one launch per row buffer. Cold: the buffers together exceed the L2 cache several times,
so every launch finds its row in DRAM. Warm: one buffer. The reported time is the median over replays
of replay time divided by launches: the cost that a captured decode step pays per call.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

L2_MULTIPLE = 4
MIN_LAUNCHES = 20
MAX_LAUNCHES = 4000


@dataclasses.dataclass
class Rows:
    """Score rows of consecutive decode steps, and the hint each step finds.

    ``logits[i]`` and ``logits[i + count / 2]`` are two consecutive steps of one request; replaying them
    in turn gives each the other's result as its hint, so the hit ratio stays what it was made to be.
    """

    logits: Tensor  # [count, batch, n]
    lengths: Tensor  # [batch] int32
    k: int

    @property
    def count(self) -> int:
        return self.logits.shape[0]


def launches_for(row_bytes: int, cold: bool) -> int:
    """Even number of launches in a graph so that a replay is long enough, and cold when asked."""
    if not cold:
        return MIN_LAUNCHES
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    wanted = -(-L2_MULTIPLE * l2 // row_bytes)
    return 2 * max(MIN_LAUNCHES // 2, min(MAX_LAUNCHES, wanted + 1) // 2)


def correlated_rows(
    n: int,
    batch: int,
    k: int,
    *,
    keep: float,
    dtype: torch.dtype,
    cold: bool,
    seed: int = 0,
    relu: bool = False,
) -> Rows:
    """Pairs of rows whose scores correlate: ``keep`` of the variance survives one step.

    Gaussian scores, each pair a fresh draw; `relu` clips negatives to the zero plateau of a ReLU
    indexer.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    row_bytes = n * batch * torch.finfo(dtype).bits // 8
    count = launches_for(row_bytes, cold)
    logits = torch.empty(count, batch, n, dtype=dtype, device="cuda")
    half = count // 2
    for i in range(half):
        base = torch.randn(batch, n, device="cuda", generator=generator)
        for step in (i, i + half):
            fresh = torch.randn(batch, n, device="cuda", generator=generator)
            scores = keep**0.5 * base + (1 - keep) ** 0.5 * fresh
            logits[step] = scores.relu() if relu else scores
    lengths = torch.full((batch,), n, dtype=torch.int32, device="cuda")
    return Rows(logits, lengths, k)


def time_graph(launch: Callable[[int], None], count: int, replays: int = 9) -> float:
    """Median microseconds per launch of a graph with ``launch(0) .. launch(count - 1)``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(count, 3)):
            launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            launch(i)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / count)
    return statistics.median(times)
