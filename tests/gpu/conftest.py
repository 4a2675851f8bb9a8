"""GPU tests need a GPU that the CUDA library serves; without one they are skipped, with the reason.

With ``GVR_TOPK_REQUIRE_GPU=1``, as `make test-gpu` runs them, they end with status 1 instead.
Where the library is a chaos build (`make test-gpu-chaos`), each test runs under one of its kinds of delay.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gvr_topk
from eval.stress.stress_library import chaos_modes, set_chaos


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"compute capability {torch.cuda.get_device_capability()}, wanted (9, 0) or later"
    status = gvr_topk.library_status()
    return None if status.loaded else f"CUDA library: {status.reason}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    if reason is None:
        return
    if os.environ.get("GVR_TOPK_REQUIRE_GPU") == "1":
        pytest.exit(f"GVR_TOPK_REQUIRE_GPU=1, but GPU tests cannot run: {reason}", returncode=1)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def delays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose a mode of a chaos build by the test's name, so that a test that fails does so again."""
    modes = chaos_modes() if _why_not() is None else 0
    if modes == 0:
        yield
        return
    set_chaos(1 + zlib.crc32(request.node.nodeid.encode()) % (modes - 1))
    yield
    set_chaos(0)
