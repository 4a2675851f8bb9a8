"""What tests of the samplers of all engines share: ops that are broken, and the law of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gvr_topk import sampling


def change_op(monkeypatch: Any, module: Any, name: str, change: Callable[[Any], object]) -> None:
    """Let a module have an op of `gvr_topk.sampling` whose results are changed."""
    op = getattr(sampling, name)

    def run(*args: Any, **others: Any) -> Any:
        found = op(*args, **others)
        change(found)
        return found

    monkeypatch.setattr(module, name, run)


def fail(*_: object, **__: object) -> None:
    """Fail as an op does that finds no room."""
    raise RuntimeError("no room\nfor this launch")


def law(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, *, joint: bool = False
) -> Tensor:
    """Probabilities of one row in fp64: filtered one after the other, or by top-p of the whole row."""
    if temperature <= 1e-4:
        temperature, top_k = 1.0, 1
    ranked, ids = (logits.double() / temperature).softmax(-1).sort(descending=True, stable=True)
    stays = ranked >= min_p * ranked[0]
    stays &= torch.arange(len(ranked)) < (top_k if top_k > 0 else len(ranked))
    mass = ranked if joint else ranked * stays
    stays &= mass.cumsum(-1) - mass < top_p * mass.sum()
    kept = torch.zeros_like(ranked).scatter(0, ids, ranked * stays)
    return kept / kept.sum()
