"""The time that some work takes, on a GPU or on the processor."""

import time
from collections.abc import Callable

import torch


def microseconds(work: Callable[[], object], *, on_gpu: bool) -> float:
    """Time of work between two events on the current CUDA stream, or of the call itself."""
    if not on_gpu:
        started = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - started)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(1e3 * start.elapsed_time(stop))
