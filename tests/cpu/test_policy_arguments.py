"""Arguments of the gate and the plan that would wrap, or be converted, on their way to the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gvr_topk.config import GvrTopkConfig
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.policy import can_use_heuristic, plan

NUMBERS = ("slot", "slots", "length", "min_length", "max_length")
FLAGS = ("enabled", "has_state", "known")
LIMITS = f"{-(2**63)} to {2**63 - 1}"
GATE: list[tuple[str, Any, str]] = [
    *((name, 2**64 + 70690, f"{LIMITS}, got {2**64 + 70690}") for name in NUMBERS),
    *((name, 5000.0, "an integer, got 5000.0") for name in NUMBERS),
    *((name, True, "an integer, got True") for name in NUMBERS),
    *((name, None, "true or false, got None") for name in FLAGS),
    *((name, 1, "true or false, got 1") for name in FLAGS),
    ("k", 0, f"1 to {MAX_WIDTH}, got 0"),
    ("k", 2**32 + 2048, f"1 to {MAX_WIDTH}, got {2**32 + 2048}"),
]


@pytest.mark.parametrize(("name", "value", "message"), GATE)
def test_the_gate_names_what_it_cannot_compare(name: str, value: Any, message: str) -> None:
    given: dict[str, Any] = {"length": 70690, "k": 2048}
    with pytest.raises(ValueError, match=f"^{name}: wanted {message}$"):
        can_use_heuristic(**given | {name: value})


def test_the_plan_names_what_is_no_flag() -> None:
    with pytest.raises(ValueError, match=r"^aligned: wanted true or false, got 1$"):
        plan(rows=1, width=5000, k=7, aligned=1)  # type: ignore[arg-type]


def test_the_gate_takes_numbers_and_flags_of_numpy() -> None:
    assert can_use_heuristic(length=np.int64(70690), k=np.int32(2048), known=np.True_).allowed  # type: ignore
    assert not can_use_heuristic(length=70690, k=2048, enabled=np.False_).allowed  # type: ignore


@pytest.mark.parametrize(
    ("configured", "limits"),
    [
        ({}, (0, MAX_WIDTH)),
        ({"min_length": 5}, (5, MAX_WIDTH)),
        ({"max_length": 9}, (0, 9)),
        ({"min_length": 5, "max_length": 9}, (5, 9)),
    ],
)
def test_limits_of_a_configuration(configured: dict[str, int], limits: tuple[int, int]) -> None:
    assert GvrTopkConfig(**configured).length_limits == limits
