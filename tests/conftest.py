"""What all tests share: how hypothesis searches, and the compiled libraries where they are wanted."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import gvr_topk
from gvr_topk import ops

BUILD = importlib.import_module("gvr_topk._build") if importlib.util.find_spec("gvr_topk._build") else None

# A slow machine must not fail a test, so no deadline. In CI every run is the same run.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP; children inherit that, and
# tests send theirs both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header() -> str:
    """Which GPUs the library under test has code for: `GVR_TOPK_ARCHS` chooses them when it is built."""
    status = gvr_topk.library_status()
    archs = f" for {BUILD.ARCHS}, from {BUILD.COMMIT or 'no commit'}" if BUILD and status.path else ""
    return f"gvr_topk: CUDA library{archs}: {status.reason}"


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    """Path of the CUDA library; skips where the package was built without a CUDA compiler."""
    status = gvr_topk.library_status()
    if status.path is None:
        pytest.skip(status.reason)
    return Path(status.path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the calls of ops, of which none runs."""
    seen: list[Any] = []
    monkeypatch.setattr(ops, "_launch", lambda kind, *passed: seen.append(kind(*passed)))
    return seen
