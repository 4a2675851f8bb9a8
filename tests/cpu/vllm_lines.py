"""What tests of the plugin share while the fake of vLLM is there: lines, counts, and an op that is broken."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm_engine import fake_vllm

from gvr_topk import sampling
from gvr_topk.integrations.vllm import plugin, sampler

LINE = "gvr_topk in vLLM 0.33.0: "
"""How each line begins."""


def calls() -> dict[tuple[str, str], int]:
    """Path and reason of the calls so far."""
    return plugin.counters().calls


@contextmanager
def logged() -> Iterator[list[str]]:
    """Lines of the integration, as vLLM's logger gets them."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(plugin.LOGGER)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def without_variables(monkeypatch: Any) -> None:
    """Unset the variables of this package and of vLLM."""
    for name in [name for name in os.environ if name.startswith(("GVR_TOPK", "VLLM"))]:
        monkeypatch.delenv(name)


@contextmanager
def lines_with(monkeypatch: Any, *switches: str) -> Iterator[list[str]]:
    """Lines of the integration in a process that can import the fake, with these switches on alone."""
    without_variables(monkeypatch)
    for name in switches:
        monkeypatch.setenv(name, "1")
    with logged() as lines, fake_vllm():
        yield lines
        plugin.unregister()


@contextmanager
def lines_of_draws(monkeypatch: Any) -> Iterator[list[str]]:
    """As `lines_with` no switch, where our op serves CPUs."""
    monkeypatch.setattr(sampler, "DEVICE", "cpu")
    random.seed(1)
    with lines_with(monkeypatch) as lines:
        yield lines


def break_sampler(monkeypatch: Any, change: Callable[[Tensor], object]) -> None:
    """Change the tokens of the op, but not what the comparison asks of it."""

    def run(logits: Tensor, **others: Any) -> Tensor:
        tokens = sampling.sample(logits, **others)
        if others.get("limits") is None and isinstance(others["top_p"], Tensor):
            change(tokens)
        return tokens

    monkeypatch.setattr(sampler, "sample", run)
