"""What tests of the SGLang plugin share: a process in which its fakes can be imported, and its lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from edited_tree import importable
from sglang_base import CALLS, HookRegistry

FAKES = Path(__file__).resolve().parents[1] / "fakes"
VERSION = "0.5.23"
PACKAGES = ("sglang", "sgl_kernel")


@contextmanager
def fake_sglang(tree: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make one tree importable, with our switch on; afterwards no trace of it is left."""
    HookRegistry.reset()
    CALLS.clear()
    for name in ("GVR_TOPK_DISABLE", "GVR_TOPK_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GVR_TOPK_SGLANG", "1")
    with importable(PACKAGES, FAKES / tree, FAKES / "sglang_kernel"):
        yield
    HookRegistry.reset()


def logged(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """What has been logged, or those lines that hold a text."""
    caplog.set_level(logging.INFO, logger="gvr_topk.integrations.sglang")
    prefix = f"gvr_topk in SGLang {VERSION}: "
    return lambda part="": [
        text.removeprefix(prefix)
        for text in (record.getMessage() for record in caplog.records)
        if part in text
    ]
