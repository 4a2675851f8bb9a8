"""Every example runs as a user runs it, checks itself, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MAX_LINES = 50

# What each example prints where no GPU is visible.
PRINTED = {
    "batch_topk.py": "batch_topk: exact in 30 of 30 steps (cpu)",
    "cuda_graph.py": "cuda_graph: no GPU with the CUDA library, so nothing is captured",
    "drafts_with_slots.py": "drafts_with_slots: exact on 24 of 24 rows (cpu)",
    "eager.py": "eager: exact on 8 of 8 steps (cpu)",
    "nearest_neighbors.py": "nearest_neighbors: ties in order for 16 of 16 queries (cpu)",
    "paged_cache.py": "paged_cache: exact on 4 of 4 steps (cpu)",
    "replay_kept_tokens.py": "replay_kept_tokens: ratio 1 for 32 of 32 tokens (cpu)",
    "torch_compile.py": "torch_compile: exact on 4 of 4 steps (cpu)",
    "verify_drafts.py": "verify_drafts: the same 63 tokens in 35 steps (cpu)",
}


def test_every_example_is_run() -> None:
    assert sorted(file.name for file in EXAMPLES.glob("*.py")) == sorted(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example(name: str, tmp_path: Path) -> None:
    """Run away from the checkout, which is on the path where the package is not installed."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout.splitlines()


@pytest.mark.parametrize("name", PRINTED)
def test_example_is_short_and_carries_the_state(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert f"python examples/{name}" in text
    assert any(f"{op}(" in text for op in ("topk", "topk_mask", "sample"))
    assert ("state=state" in text) == ("TopkState" in text or "RequestSlots" in text)
