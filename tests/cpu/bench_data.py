"""What tests of the kernel benchmark share: short chains, and a chunk of a prefill."""

import pytest

from eval.bench import kernel_timing
from eval.bench.bench_cases import Cell


@pytest.fixture(autouse=True)
def short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chains on the CPU be as short as a chain can be, whatever a row's size."""
    monkeypatch.setattr(kernel_timing, "MIN_STEPS", 6)
    monkeypatch.setattr(kernel_timing, "MAX_STEPS", 6)


CAUSAL = Cell("prefill", 300, 200, k=64, rows="causal")
