"""Timing of one kernel call inside a CUDA graph, cold or warm, on rows with a chosen hit ratio.

A graph holds one launch per row buffer, and at least 20 launches. Cold: the buffers together exceed the
L2 cache several times, so every launch finds its row in DRAM. Warm: buffers that together stay in L2.
The reported time is the median over replays of replay time divided by launches: the cost that a captured
decode step pays per call.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]

L2_MULTIPLE = 4
MIN_LAUNCHES = 20
MAX_BUFFERS = 4000
"""Most buffers rotated: rows under 64 KB pass the L2 cache once or twice, not `L2_MULTIPLE` times."""

ALIGNMENT = 16
"""Row widths are multiples of this many elements, as an engine's buffers are."""

GENERATED_ELEMENTS = 1 << 26
"""Elements drawn at a time, to bound the memory that making rows takes."""


@dataclasses.dataclass
class Rows:
    """Score rows of consecutive decode steps, and the hint each step finds.

    ``logits[i]`` and ``logits[i + count / 2]`` are two consecutive steps of one request; replaying them
    in turn gives each the other's result as its hint, so the hit ratio stays what it was made to be.
    Give both the same slot of `prior`: ``i % half``. What lies past a row's length is NaN, which a
    kernel that reads it would rank first.
    """

    logits: Tensor  # [count, batch, width]
    lengths: Tensor  # [batch] int32, or [count, batch] where the steps differ
    k: int
    shift: int = 0  # positions by which the scores of the later step have moved

    @property
    def count(self) -> int:
        return self.logits.shape[0]

    @property
    def half(self) -> int:
        return self.count // 2

    def lengths_of(self, index: int) -> Tensor:
        """Row lengths of one buffer, ``[batch]``, int32."""
        return self.lengths if self.lengths.dim() == 1 else self.lengths[index]

    def offset_of(self, index: int) -> int:
        """What to add to the other step's positions so that they follow the scores."""
        return self.shift if index >= self.half else -self.shift

    def few(self, count: int) -> Rows:
        """The first pairs alone, `count` buffers in all: for a graph that stays warm."""
        pairs = min(count // 2, self.half)
        pick = [*range(pairs), *range(self.half, self.half + pairs)]
        lengths = self.lengths if self.lengths.dim() == 1 else self.lengths[pick]
        return Rows(self.logits[pick], lengths, self.k, self.shift)


def buffers_for(step_bytes: int, cold: bool) -> int:
    """Even number of row buffers: enough to outgrow the L2 cache when cold, few enough to stay when warm."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    if not cold:
        return MIN_LAUNCHES if 2 * MIN_LAUNCHES * step_bytes <= l2 else 2
    wanted = -(-L2_MULTIPLE * l2 // step_bytes)
    return 2 * max(1, min(MAX_BUFFERS, wanted + 1) // 2)


def fits_in_l2(step_bytes: int) -> bool:
    """Whether a pair of steps stays in half the L2 cache, so that a warm time means something."""
    return bool(4 * step_bytes <= torch.cuda.get_device_properties(0).L2_cache_size)


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
    shift: int = 0,
) -> Rows:
    """Pairs of rows whose scores correlate: ``keep`` of the variance survives one step.

    Gaussian scores, each pair a fresh draw; `relu` clips negatives to the zero plateau of a ReLU
    indexer; `shift` moves the later step's scores by that many positions.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = _nan_rows(buffers_for(n * batch * dtype.itemsize, cold), batch, n, dtype)
    half = logits.shape[0] // 2
    chunk = max(1, GENERATED_ELEMENTS // (batch * n))
    for first in range(0, half, chunk):
        pairs = min(chunk, half - first)
        base = torch.randn(pairs, batch, n, device="cuda", generator=generator)
        for step in (0, 1):
            fresh = torch.randn(pairs, batch, n, device="cuda", generator=generator)
            scores = keep**0.5 * base + (1 - keep) ** 0.5 * fresh
            if step and shift:
                scores = scores.roll(shift, dims=2)
            start = step * half + first
            logits[start : start + pairs, :, :n] = scores.relu() if relu else scores
    lengths = torch.full((batch,), n, dtype=torch.int32, device="cuda")
    return Rows(logits, lengths, k, shift)


def rows_from_pairs(
    pairs: Sequence[tuple[Floats, Floats]], batch: int, k: int, *, dtype: torch.dtype, cold: bool
) -> Rows:
    """Rows of given pairs of consecutive steps, repeated over as many buffers as a graph needs.

    Every row of a batch is the same. Steps may differ in length.
    """
    width = max(len(row) for pair in pairs for row in pair)
    logits = _nan_rows(buffers_for(width * batch * dtype.itemsize, cold), batch, width, dtype)
    count = logits.shape[0]
    half = count // 2
    lengths = torch.empty(count, batch, dtype=torch.int32, device="cuda")
    for which, pair in enumerate(pairs[:half]):
        for step, row in enumerate(pair):
            places = slice(step * half + which, (step + 1) * half, min(len(pairs), half))
            logits[places, :, : len(row)] = torch.from_numpy(row).to("cuda", dtype)
            lengths[places] = len(row)
    return Rows(logits, lengths, k)


def _nan_rows(count: int, batch: int, n: int, dtype: torch.dtype) -> Tensor:
    width = -(-n // ALIGNMENT) * ALIGNMENT
    return torch.full((count, batch, width), float("nan"), dtype=dtype, device="cuda")


def time_graph(
    launch: Callable[[int], None], count: int, replays: int = 9, budget: float = math.inf
) -> float:
    """Median microseconds per launch of a graph that runs ``launch(0) .. launch(count - 1)`` in turn.

    Short lists are repeated to at least `MIN_LAUNCHES` launches. Replays end early, though not before
    the third, once they have taken `budget` seconds.
    """
    launches = -(-max(count, MIN_LAUNCHES) // count) * count
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(count, 3)):
            launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            launch(i % count)
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
        times.append(1000 * start.elapsed_time(stop) / launches)
        if len(times) >= 3 and sum(times) * launches > 1e6 * budget:
            break
    return statistics.median(times)
