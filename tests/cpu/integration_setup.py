"""What tests of the TensorRT-LLM integration share: how its hook is put in place, and an oracle."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from engine import Engine, Request, load_dsa
from torch.utils._python_dispatch import TorchDispatchMode

from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations.tensorrt_llm import hook
from gvr_topk.integrations.tensorrt_llm.hint_state import HintState

VARIABLES = (
    "GVR_TOPK_DISABLE",
    "TRTLLM_GVR_TOPK",
    "TRTLLM_GVR_TOPK_OPTIONS",
    "TRTLLM_GVR_TOPK_YAML",
    "TRTLLM_GVR_TOPK_METRICS_DIR",
)


def hooked(monkeypatch: pytest.MonkeyPatch, mode: str = "1", **options: Any) -> ModuleType:
    """Import the DSA module with the hook on."""
    monkeypatch.setenv("TRTLLM_GVR_TOPK", mode)
    if options:
        monkeypatch.setenv("TRTLLM_GVR_TOPK_OPTIONS", json.dumps(options))
    dsa = load_dsa()
    assert integration.install()
    return dsa


def state_of(engine: Engine) -> HintState:
    return integration.plugin._integration.hook.state_of(engine.manager)


def running(*ids: int, done: int = 30) -> list[Request]:
    """Requests whose prompt of 30 tokens is in the cache, with `done` tokens so far."""
    return [Request(i, 30, 99, seed=i, done=done) for i in ids]


def named_arguments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each call of the op passes by name from now on; the list grows."""
    real, given = hook.indexer_topk_decode, []

    def noting(*args: Any, **arguments: Any) -> torch.Tensor:
        given.append(arguments)
        return real(*args, **arguments)

    monkeypatch.setattr(hook, "indexer_topk_decode", noting)
    return given


def lines_of(level: str) -> list[str]:
    """What TensorRT-LLM's logger was given at a level."""
    return [text for at, text in sys.modules["tensorrt_llm.logger"].logger.lines if at == level]


def check_decode_rows(*, in_order: bool) -> list[int]:
    """Compare every decode row that the loaded fake selects from now on with the oracle.

    Positions are `in_order` where this package's op selects them, and not where TensorRT-LLM's own does. The
    list has the rows of each call that was compared; it grows.
    """
    compared: list[int] = []

    def check(logits: torch.Tensor, lengths: torch.Tensor, chosen: torch.Tensor) -> None:
        expected = sorted_topk(logits, lengths, chosen.shape[1])
        if in_order:
            assert torch.equal(chosen, expected)
        else:
            assert torch.equal(chosen.sort(1).values, expected.sort(1).values)
        compared.append(len(chosen))

    sys.modules["fake_base"].on_decode = check
    return compared


def both_ways(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Any], tuple[Engine, list[torch.Tensor]]], **options: Any
) -> tuple[Engine, list[torch.Tensor], int]:
    """Let an engine work without the hook and with it; the latter, what it selects, and of how many rows.

    `work` takes the DSA module. What it selects both times is the same, and in decode rows the oracle's.
    """
    dsa = load_dsa()
    theirs_compared = check_decode_rows(in_order=False)
    _, plain = work(dsa)
    assert hooked(monkeypatch, **options) is dsa
    ours_compared = check_decode_rows(in_order=True)
    engine, chosen = work(dsa)
    assert ours_compared == theirs_compared
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(chosen, plain, strict=True))
    return engine, chosen, sum(ours_compared)


class Watch(TorchDispatchMode):
    """Lists what reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))
