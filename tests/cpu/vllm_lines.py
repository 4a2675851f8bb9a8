"""What the plugin of vLLM logs while the fake engine samples."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_engine import Log, fake_vllm

from gvr_topk.integrations.vllm import plugin


@contextmanager
def lines_with_sampler(monkeypatch: Any) -> Iterator[list[str]]:
    """Lines of the integration in a process that can import the fake, with the sampler's switch on."""
    for name in [name for name in os.environ if name.startswith(("GVR_TOPK", "VLLM"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GVR_TOPK_SAMPLER", "1")
    handler, logger = Log(), logging.getLogger(plugin.LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with fake_vllm():
        yield handler.lines
        plugin.unregister()
    logger.removeHandler(handler)
