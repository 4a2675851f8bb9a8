"""What tests of the plugin share while the fake of vLLM is there: its lines, and an op that is broken."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm_engine import Log, fake_vllm

from gvr_topk import sampling
from gvr_topk.integrations.vllm import plugin, sampler


@contextmanager
def lines_with(monkeypatch: Any, *switches: str) -> Iterator[list[str]]:
    """Lines of the integration in a process that can import the fake, with these switches on alone."""
    for name in [name for name in os.environ if name.startswith(("GVR_TOPK", "VLLM"))]:
        monkeypatch.delenv(name)
    for name in switches:
        monkeypatch.setenv(name, "1")
    handler, logger = Log(), logging.getLogger(plugin.LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with fake_vllm():
        yield handler.lines
        plugin.unregister()
    logger.removeHandler(handler)


@contextmanager
def lines_of_draws(monkeypatch: Any) -> Iterator[list[str]]:
    """As `lines_with` the sampler's switch, where our op serves CPUs."""
    monkeypatch.setattr(sampler, "DEVICE", "cpu")
    random.seed(1)
    with lines_with(monkeypatch, "GVR_TOPK_SAMPLER") as lines:
        yield lines


def break_sampler(monkeypatch: Any, change: Callable[[Tensor], object]) -> None:
    """Change the tokens of the op, but not what the comparison asks of it."""

    def run(logits: Tensor, **others: Any) -> Tensor:
        tokens = sampling.sample(logits, **others)
        if others.get("limits") is None and isinstance(others["top_p"], Tensor):
            change(tokens)
        return tokens

    monkeypatch.setattr(sampler, "sample", run)
