"""What tests of the TensorRT-LLM integration share: a process that no other test has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gvr_topk.integrations import tensorrt_llm as integration


@contextmanager
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run without our variables and hooks, on one thread; afterwards nothing is left of a test."""
    for name in ("GVR_TOPK_DISABLE", "TRTLLM_GVR_TOPK", "TRTLLM_GVR_TOPK_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    integration.uninstall()  # where the package is installed, its import hook waits for the fakes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
    yield
    torch.set_num_threads(threads)
    integration.uninstall()
