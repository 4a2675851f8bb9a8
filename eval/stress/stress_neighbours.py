"""Work that runs beside the op on another stream, and waiting that notices a GPU that hangs.

A neighbour is fed: whoever runs the op calls `Neighbour.feed` again and again, which keeps a few groups of
the neighbour's kernels queued, each of a few tenths of a millisecond. Groups are short because a cluster of
16 CTAs does not start while another kernel holds a quarter of the SMs, and because each new group comes to
lie on other SMs.
"""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from eval.fuzz.draw import Draw
from eval.stress.stress_cases import Configuration
from eval.stress.stress_library import HOW_TO_BUILD, StressError, TimeLog, neighbours_library, succeed
from eval.stress.stress_workload import Workload

NEIGHBOURS = ("none", "sms", "smem", "l1", "dram", "index_add", "sort", "matmul", "copy", "second")
"""Nothing; four kernels of the library of neighbours, which hold SMs or keep busy the shared-memory pipe, the
tag stage of L1, and DRAM; four operations of torch; and a second instance of the op on its own stream."""

HELD_SMS = 32
"""From so many on, the CTAs that are left free in a GPC no longer make a cluster of 16."""

BUSY_CTAS = 40
"""CTAs that keep a pipe of their SMs busy: on some of the SMs, so that CTAs of one cluster fare differently.
They have 128 threads with at most 32 registers, so that one of the op fits beside each."""

GROUP_MICROSECONDS = 150.0
QUEUED_GROUPS = 3
FEEDING_SECONDS = 1.0
"""Without the op advancing; then its neighbour is left to end, so that nothing but a hang lasts longer."""

HANG_SECONDS = 60.0

Work = Callable[[], object]
"""Enqueues kernels on the current stream."""


class Hang(RuntimeError):
    """The device did not finish in time; it cannot be expected to answer any more."""


def wait_for(
    event: torch.cuda.Event, feed: Callable[[], None] | None = None, seconds: float = HANG_SECONDS
) -> None:
    """Wait for an event, and go on feeding a neighbour meanwhile; raise `Hang` after so many seconds."""
    started = time.monotonic()
    while not event.query():
        waited = time.monotonic() - started
        if feed is not None and waited < FEEDING_SECONDS:
            feed()
        if waited > seconds:
            raise Hang(f"the device did not finish within {seconds:g} s")


class Neighbour:
    """Groups of kernels on a stream of their own; a context in which they may run.

    `launch` enqueues a group on the current stream, or is called at each feeding on the CPU.
    """

    def __init__(self, name: str, launch: Work | None = None, *, on_cpu: bool = False) -> None:
        self.name = name
        self.groups = 0  # launched since the context was entered
        self.idle = 0  # feedings that found no group running or waiting
        self.workload: Workload | None = None  # what it launches, if that is the op
        self.log: TimeLog | None = None  # when it began and ended to rewrite
        self._launch = launch
        self._on_cpu = on_cpu
        self._queued: deque[torch.cuda.Event] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        if launch is not None and not on_cpu:
            self._stream = torch.cuda.Stream()
            self._warm_up()

    def _warm_up(self) -> None:
        """Loads the kernels and takes the memory, for which the device may wait for all streams."""
        torch.cuda.synchronize()
        for _ in range(2):
            self._enqueue()
        torch.cuda.synchronize()
        self._spare.extend(self._queued)
        self._queued.clear()

    def _enqueue(self) -> None:
        assert self._launch is not None and self._stream is not None
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._launch()
            event.record()
        self._queued.append(event)

    def feed(self) -> None:
        """Launch as many groups as are missing; returns at once."""
        if self._launch is None:
            return
        if self._on_cpu:
            self.groups += 1
            self._launch()
            return
        while self._queued and self._queued[0].query():
            self._spare.append(self._queued.popleft())
        self.idle += not self._queued
        while len(self._queued) < QUEUED_GROUPS:
            self.groups += 1
            self._enqueue()

    def __enter__(self) -> "Neighbour":
        self.feed()
        self.groups, self.idle = len(self._queued), 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Behind an error nothing of the device can be waited for.
        while self._queued and kind is None:
            wait_for(self._queued[-1])
            self._spare.extend(self._queued)
            self._queued.clear()


def make_neighbour(name: str, device: str, configuration: Configuration) -> Neighbour:
    """Make one of `NEIGHBOURS` ready to run; on the CPU there is only ``none``.

    A second instance of the op is of this configuration.
    """
    if name not in NEIGHBOURS or (device == "cpu" and name != "none"):
        there = NEIGHBOURS if device == "cuda" else ("none",)
        raise ValueError(f"neighbour on {device}: wanted one of {', '.join(there)}, got {name!r}")
    if name == "none":
        return Neighbour(name)
    if name == "second":
        second = Workload(configuration, device, launches=16, seed=1)
        neighbour = Neighbour(name, _launches_of(second))
        neighbour.workload = second
        return neighbour
    if name in _TORCH:
        return Neighbour(name, _TORCH[name]())
    return Neighbour(name, _kernel(name))


def _launches_of(workload: Workload) -> Work:
    def launch() -> None:
        own = torch.cuda.current_stream()
        assert workload.stream is not None
        workload.stream.wait_stream(own)
        workload.replay()
        own.wait_stream(workload.stream)

    return launch


def _kernel(name: str) -> Work:
    """A kernel of the library of neighbours, several launches a group."""
    library = neighbours_library()
    if library is None:
        raise StressError(f"neighbour {name!r} needs a library that was not built: {HOW_TO_BUILD}")
    sms = int(torch.cuda.get_device_properties(0).multi_processor_count)
    # A large cluster waits for the end of each launch that holds SMs, so these are shorter.
    launches = 4 if name == "sms" else 2
    time_us = GROUP_MICROSECONDS / launches
    # 16 MB stay in L2, and 1 GB does not.
    words = torch.zeros({"l1": 1 << 22, "dram": 1 << 28}.get(name, 0), dtype=torch.int32, device="cuda")

    def launch_one(stream: int) -> int:
        if name == "sms":
            return library.gvr_topk_hold_sms(stream, min(HELD_SMS, sms // 2), -1, time_us)
        if name == "smem":
            return library.gvr_topk_hammer_shared(stream, BUSY_CTAS, time_us)
        if name == "l1":
            return library.gvr_topk_hammer_l1(stream, BUSY_CTAS, time_us, words.data_ptr(), words.numel())
        assert name == "dram"
        return library.gvr_topk_stream_dram(stream, sms, time_us, words.data_ptr(), words.nbytes)

    def launch() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(launches):
            succeed(launch_one(stream))

    return launch


def _index_add() -> Work:
    into = torch.zeros(1 << 15, 256, device="cuda")
    where = torch.randint(len(into), (1 << 16,), device="cuda")
    added = torch.ones(len(where), into.shape[1], device="cuda")
    return lambda: into.index_add_(0, where, added)


def _sort() -> Work:
    values = torch.randn(1 << 21, device="cuda")
    result = (torch.empty_like(values), torch.empty(len(values), dtype=torch.int64, device="cuda"))
    return lambda: torch.sort(values, out=result)


def _matmul() -> Work:
    # Each product takes all SMs to its end, and is over soon.
    a = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
    result = torch.empty_like(a)
    return lambda: [torch.mm(a, a, out=result) for _ in range(4)]


def _copy() -> Work:
    source = torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


_TORCH = {"index_add": _index_add, "sort": _sort, "matmul": _matmul, "copy": _copy}


def make_rewriter(target: Tensor, pool: Tensor) -> Neighbour:
    """A neighbour that keeps rewriting a tensor, word by word, with words of prepared contents.

    Rows of the target ``[rows, columns]`` begin and end at whole words of 32 bits. The pool ``[contents,
    ...]`` is contiguous and of the same dtype, and each content has as many elements.
    """
    contents = len(pool)
    assert pool.is_contiguous() and pool.dtype == target.dtype and pool[0].numel() == target.numel()
    if target.device.type == "cpu":
        draw = Draw("cpu", 0)
        choices = pool.view(contents, *target.shape)

        def rewrite() -> None:
            which = draw.integers(0, contents, *target.shape)
            target.copy_(choices.gather(0, which[None])[0])

        return Neighbour("rewriter", rewrite, on_cpu=True)
    library = neighbours_library()
    if library is None:
        raise StressError(f"rewriting needs a library that was not built: {HOW_TO_BUILD}")
    scale = target.element_size()
    rows, columns = target.shape
    assert columns * scale % 4 == 0 and target.stride(0) * scale % 4 == 0
    # A few words are rewritten by one warp: many warps would do nothing but wait for each other.
    ctas, threads = (1, 32) if rows * columns <= 64 else (4, 128)

    log = TimeLog()

    def launch() -> None:
        succeed(
            library.gvr_topk_rewrite(
                torch.cuda.current_stream().cuda_stream,
                ctas,
                threads,
                2 * GROUP_MICROSECONDS,
                target.data_ptr(),
                rows,
                columns * scale // 4,
                max(target.stride(0), columns) * scale // 4,
                pool.data_ptr(),
                contents,
                *log.arguments,
            )
        )

    rewriter = Neighbour("rewriter", launch)
    rewriter.log = log
    return rewriter
