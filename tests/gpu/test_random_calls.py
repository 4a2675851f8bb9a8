"""Random calls of the ops, as the fuzzer draws them: any option beside any other, on every kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eval.fuzz.cases import blocks_cases, decode_cases, draw_cases, prefill_cases
from eval.fuzz.fuzz import BATCH, ELEMENTS, check_case

BATCHES = 48
STRATEGIES: dict[str, Callable[[int], Any]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "blocks": blocks_cases,
}


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("op", STRATEGIES)
def test_random_calls(op: str, batch: int) -> None:
    """Twice each, with guard words around what is written; the second one finds the state of the first."""
    for case in draw_cases(STRATEGIES[op](ELEMENTS["cuda"]), batch, BATCH):
        check_case(case, "cuda")
