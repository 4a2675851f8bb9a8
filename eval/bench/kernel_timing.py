"""Chains of decode steps, and the time of one kernel call inside a CUDA graph that walks such a chain.

A graph's launches walk consecutive decode steps, each on a row of its own that no launch before it has seen,
as a serving engine's do. What one step leaves for the next is carried in the same slots. Every replay begins
with the state that the step before the first one has left, on poisoned outputs and with nothing of the rows
in the L2 cache; its time divided by its launches is the cost that a captured decode step pays per call.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eval.common.timing import microseconds

POISON = -7777
"""Content of an output before a launch: no position, and not the -1 of a padded row either."""

L2_MULTIPLE = 4
MIN_STEPS = 20
MAX_STEPS = 4000
"""Most buffers of a chain: rows under 64 KB pass the L2 cache once or twice, not `L2_MULTIPLE` times. They
are cold all the same, because the cache is flushed before a replay, which reads each buffer once."""

LEAD = 4
"""Steps that run before the first timed one, so that it finds the state of a chain under way."""

GRAPHS = 3
"""Captures of the same launches that are timed. In the first one kernels of 9 us were seen to take 5 % longer
than in all others, on the same rows and outputs (``eval/results/h100/first_graph.log``)."""

ALIGNMENT = 16
"""Row widths are multiples of this many elements, as an engine's buffers are."""

GENERATED_ELEMENTS = 1 << 26
"""Elements drawn at a time, to bound the memory that making rows takes."""

CHUNK_BUFFERS = 8
CHUNKS_BYTES = 1 << 31
"""Most buffers of a chunk of a prefill, and most bytes of them together unless there is one alone."""

SLEEP_CYCLES = 200_000
SLEEP_CYCLES_PER_LAUNCH = 1000
"""How long the device waits before a timed replay, so that the host has launched the graph by then and its
time is no part of the figure."""

HOST_L2_BYTES = 1 << 16
"""Stands for the L2 cache where the device has none to tell, which keeps chains on the CPU short."""


@dataclasses.dataclass
class Chain:
    """Score rows of consecutive decode steps; every row of a batch is a request, and a chain, of its own.

    A chunk of a prefill is a chain of one step, whose rows are the chunk's. Where fewer steps are fresh than
    timed, the chain begins again in further buffers, and the step from its last row to its first counts as it
    is.
    """

    logits: Tensor  # ``[count, batch, width]``; NaN past a row's length, so that a kernel that reads it fails
    lengths: Tensor  # int32, ``[batch]`` of all steps or ``[count, batch]``
    k: int  # items per row
    lead: int = LEAD  # steps at the beginning that run untimed before every measurement
    fresh: int = 0  # different steps among the timed ones
    shift: int = 0  # positions by which scores move from step to step

    @property
    def count(self) -> int:
        return self.logits.shape[0]

    @property
    def batch(self) -> int:
        return self.logits.shape[1]

    @property
    def timed(self) -> range:
        """The steps that are timed, in order."""
        return range(self.lead, self.count)

    def outputs(self, items: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        """Room for the results of all steps, ``[count, batch, items]``; of `k` items by default."""
        shape = (self.count, self.batch, items or self.k)
        return torch.full(shape, POISON, dtype=dtype, device=self.logits.device)

    def lengths_of(self, step: int) -> Tensor:
        """Row lengths of one step, ``[batch]``, int32."""
        return self.lengths if self.lengths.dim() == 1 else self.lengths[step]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An implementation bound to a chain."""

    launch: Callable[[int], None]  # serves one step
    results: Tensor  # the answers, int32 or int64 ``[count, batch, k]``
    state: tuple[Tensor, ...] = ()  # what a step leaves for the next one, in place
    carried: Callable[[], Tensor] | None = None  # the choice that the last step has left, ``[batch, k]``
    statistics: Callable[[int, Tensor], None] | None = None  # `launch` that fills ``[batch, columns]``, too

    def poison(self) -> None:
        self.results.fill_(POISON)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A kernel of ours or of another project, bound to nothing yet."""

    name: str
    prepare: Callable[[Chain], Prepared]
    # Of rows, width, k and dtype: why it cannot serve a shape, or an empty string.
    refuse: Callable[[int, int, int, torch.dtype], str] = lambda rows, width, k, dtype: ""
    version: str = ""  # what exactly was loaded of another project
    why_not: str = ""  # why it cannot be loaded here; empty when it can


def l2_bytes(device: torch.device | str) -> int:
    """Size of the device's L2 cache."""
    if torch.device(device).type != "cuda":
        return HOST_L2_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def steps_for(step_bytes: int, device: torch.device | str) -> int:
    """How many steps a chain of so many bytes each has, so that it outgrows the L2 cache several times."""
    needed = -(-L2_MULTIPLE * l2_bytes(device) // step_bytes) + 1
    return max(MIN_STEPS, min(MAX_STEPS, needed))


def gaussian_chain(
    n: int,
    batch: int,
    k: int,
    *,
    keep: float,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    shift: int = 0,
    octaves: float = 0.0,
    width: int = 0,
    change: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> Chain:
    """Gaussian rows of length `n` as a first-order autoregression: `keep` of the variance survives a step.

    Scores move by `shift` positions at each step. The scale of each row of each step is 2 to the power of a
    uniform number from ``-octaves`` to ``octaves``. The buffers have `width` columns if it is not 0.
    ``change(rows, generator)`` returns rows ``[steps, batch, n]`` changed, for instance masked; the chain
    goes on from unchanged ones. The autoregression is in fp32 whatever the dtype.
    """
    generator = torch.Generator(device).manual_seed(0)
    timed = steps_for(n * batch * dtype.itemsize, device)
    logits = nan_rows(LEAD + timed, batch, width or aligned(n), dtype, device)
    current = torch.randn(batch, n, device=device, generator=generator)
    chunk = max(1, GENERATED_ELEMENTS // (batch * n))
    for first in range(0, len(logits), chunk):
        steps = min(chunk, len(logits) - first)
        rows = torch.randn(steps, batch, n, device=device, generator=generator).mul_((1 - keep) ** 0.5)
        for row in rows:
            current = row.add_(current.roll(shift, dims=1) if shift else current, alpha=keep**0.5)
        if octaves:
            drawn = torch.rand(steps, batch, 1, device=device, generator=generator)
            rows = rows * torch.exp2(octaves * (2 * drawn - 1))
        logits[first : first + steps, :, :n] = rows if change is None else change(rows, generator)
    lengths = torch.full((batch,), n, dtype=torch.int32, device=device)
    return Chain(logits, lengths, k, fresh=timed, shift=shift)


def chain_of(
    steps: Sequence[Tensor],
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> Chain:
    """Given steps ``[batch, length]``, which may differ in length, as a chain that outgrows the L2 cache.

    The chain walks all of them, then begins again in new buffers. The last few lead, so that the first step
    follows the last at every beginning alike.
    """
    batch, width = steps[0].shape[0], max(step.shape[1] for step in steps)
    copies = -(-steps_for(width * batch * dtype.itemsize, device) // len(steps))
    lead = min(LEAD, len(steps))
    logits = nan_rows(lead + copies * len(steps), batch, aligned(width), dtype, device)
    lengths = torch.empty(len(logits), batch, dtype=torch.int32, device=device)
    for at, step in enumerate([*steps[len(steps) - lead :], *steps]):
        length = step.shape[1]
        where = slice(at, at + 1) if at < lead else slice(at, None, len(steps))
        logits[where, :, :length] = step.to(device, dtype)
        lengths[where] = length
    return Chain(logits, lengths, k, lead=lead, fresh=len(steps))


def chunk_chain(chunk: Tensor, lengths: Tensor, k: int) -> Chain:
    """One chunk of a prefill as a chain of one step, which is walked again in a few further buffers.

    A launch reads more than the L2 cache holds, so further buffers serve for large chunks no purpose; for
    small ones several launches share the microseconds that the ends of a graph take. Scores ``[rows, width]``
    are NaN behind `lengths`, which are the ends of windows that begin at column 0.
    """
    copies = max(1, min(CHUNK_BUFFERS, CHUNKS_BYTES // (chunk.numel() * chunk.element_size())))
    logits = chunk[None] if copies == 1 else chunk.repeat(copies, 1, 1)
    return Chain(logits, lengths, k, lead=0, fresh=1)


def aligned(n: int) -> int:
    """Columns of a buffer for rows of `n` scores, all of which start at a 16-byte boundary."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def nan_rows(count: int, batch: int, width: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Room for rows, ``[count, batch, width]``, all NaN."""
    return torch.full((count, batch, width), float("nan"), dtype=dtype, device=device)


@functools.cache
def _unrelated(device: torch.device) -> Tensor:
    """What is read to empty the L2 cache of everything else."""
    return torch.zeros(L2_MULTIPLE * l2_bytes(device) // 4, dtype=torch.int32, device=device)


class ChainRun:
    """An implementation that walks a chain again and again, from the same honest situation each time.

    The leading steps run here, once; the state that they leave is kept.
    """

    def __init__(self, chain: Chain, prepared: Prepared) -> None:
        self.chain = chain
        self.prepared = prepared
        self.cuda = chain.logits.is_cuda
        self._stream = torch.cuda.Stream() if self.cuda else None
        for step in range(chain.lead):
            prepared.launch(step)
        self._saved = tuple(tensor.clone() for tensor in prepared.state)

    def begin(self) -> None:
        """Poison the outputs, give back the state of the step before the first timed one, empty L2."""
        self.prepared.poison()
        self.restore()
        if self.cuda:
            # Reading leaves no changed lines behind that a timed launch would have to write to memory.
            _unrelated(self.chain.logits.device).amax()

    def restore(self) -> None:
        """Give back the state that the leading steps have left."""
        for tensor, saved in zip(self.prepared.state, self._saved, strict=True):
            tensor.copy_(saved)

    def time(self, replays: int, budget: float = math.inf, after: Callable[[], None] | None = None) -> float:
        """Microseconds per launch: the least of the medians over replays of each of `GRAPHS` graphs.

        The graphs take turns, and `after` is called after each replay. After `budget` seconds of replay time
        no further turn is started, though not before the third.
        """

        def launch_all() -> None:
            for step in self.chain.timed:
                self.prepared.launch(step)

        graphs = [self.capture(launch_all) for _ in range(GRAPHS)]
        launches = len(self.chain.timed)
        times: list[list[float]] = []
        for _ in range(replays):
            times.append([])
            for replay in graphs:
                self.begin()
                times[-1].append(self._microseconds(replay, launches) / launches)
                if after is not None:
                    after()
            if len(times) >= 3 and sum(map(sum, times)) * launches > 1e6 * budget:
                break
        return min(map(statistics.median, zip(*times, strict=True)))

    def time_each(self, launches: int, passes: int = 3) -> list[float]:
        """Microseconds of each of so many launches, each the median of a few passes.

        The chain is walked over and over until there are enough. Events stand between the launches inside
        one graph, so the host has no part in the times, and what they add is about the same for all
        launches. On the CPU, whose launches are done when they return, the host's clock stands for them.
        """
        timed = self.chain.timed
        order = [timed[at % len(timed)] for at in range(launches)]
        taken = []
        if not self.cuda:
            for _ in range(passes):
                self.begin()
                stamps = [time.perf_counter()]
                for step in order:
                    self.prepared.launch(step)
                    stamps.append(time.perf_counter())
                taken.append([1e6 * (b - a) for a, b in itertools.pairwise(stamps)])
        else:
            events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(launches + 1)]

            def launch_all() -> None:
                events[0].record()
                for step, event in zip(order, events[1:], strict=True):
                    self.prepared.launch(step)
                    event.record()

            replay = self.capture(launch_all)
            for _ in range(passes):
                self.begin()
                self._microseconds(replay, launches)
                torch.cuda.synchronize()
                taken.append([1000 * a.elapsed_time(b) for a, b in itertools.pairwise(events)])
        return [statistics.median(times) for times in zip(*taken, strict=True)]

    def capture(self, launch_all: Callable[[], object]) -> Callable[[], object]:
        """A graph of some launches, replayed by calling it; on the CPU, the launches themselves."""
        if self._stream is None:
            return launch_all
        self._stream.wait_stream(torch.cuda.current_stream())
        # What an implementation does on its first calls on a stream does not belong into the graph.
        with torch.cuda.stream(self._stream):
            for step in range(min(3, self.chain.count)):
                self.prepared.launch(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            launch_all()
        self.begin()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def _microseconds(self, replay: Callable[[], object], launches: int) -> float:
        if self.cuda:
            torch.cuda._sleep(SLEEP_CYCLES + SLEEP_CYCLES_PER_LAUNCH * launches)
        return microseconds(replay, on_gpu=self.cuda)
