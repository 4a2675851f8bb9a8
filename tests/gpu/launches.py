"""What tests of launches share: a captured graph, what a launch may not do, and what it cannot serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gvr_topk.constants import PAPER_MAX_WIDTH


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of what has run once before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@contextmanager
def never_waiting() -> Iterator[None]:
    """Nothing inside may wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def unobtrusive() -> Iterator[None]:
    """Nothing inside may allocate memory or wait for the device."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with never_waiting():
        yield
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def skip_unserved(path: str, width: int) -> None:
    if path == "paper_gvr" and width > PAPER_MAX_WIDTH:
        pytest.skip("the paper's kernel has no such width")
