"""What tests of the plugin share while the fake of vLLM is there: lines, counts, checks, and a broken op."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm_engine import Step

from gvr_topk import sampling
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations.vllm import plugin, sampler
from gvr_topk.integrations.vllm.upstream import INDEXER_MODULE

LINE = "gvr_topk in vLLM 0.33.0: "
"""How each line begins."""


def calls() -> dict[tuple[str, str], int]:
    """Path and reason of the calls so far."""
    return plugin.counters().calls


def assert_exact(step: Step, topk: int, ours: bool = True) -> None:
    """Every row as the oracle has it; the fake's own top-k has the same set in another order."""
    for name, logits in step.logits.items():
        wanted = sorted_topk(logits, step.lengths, topk)
        got = step.chosen[name]
        if ours:
            assert torch.equal(got, wanted)
        else:
            assert torch.equal(got.sort(1).values, wanted.sort(1).values)
            assert not torch.equal(got, wanted)


def assert_prompts_exact(step: Step, topk: int, ours: bool = True) -> None:
    """The same of the rows of the prompts."""
    assert step.prompts is not None and len(step.prompts.lengths) > 0
    assert_exact(step.prompts, topk, ours)


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


def prefill_op() -> Any:
    """The op of vLLM's prefill top-k, or what stands in for it since the indexer was loaded."""
    importlib.import_module(INDEXER_MODULE)
    return torch.ops._C.top_k_per_row_prefill


def register_with(monkeypatch: Any, **variables: str) -> None:
    """Register the plugin, again if it is there, in a process with these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugin.unregister()
    plugin.register()


def break_sampler(monkeypatch: Any, change: Callable[[Tensor], object]) -> None:
    """Change the tokens of the op, but not what the comparison asks of it."""

    def run(logits: Tensor, **others: Any) -> Tensor:
        tokens = sampling.sample(logits, **others)
        if others.get("limits") is None and isinstance(others["top_p"], Tensor):
            change(tokens)
        return tokens

    monkeypatch.setattr(sampler, "sample", run)
