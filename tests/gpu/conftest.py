"""GPU tests need a GPU that the CUDA library serves; without one they are skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gvr_topk


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"compute capability {torch.cuda.get_device_capability()}, want (9, 0) or later"
    status = gvr_topk.library_status()
    return None if status.loaded else f"CUDA library: {status.reason}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    if reason is None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
