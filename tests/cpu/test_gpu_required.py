"""`make test-gpu` fails where no GPU test can run, instead of passing with all of them skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("required", ["", "1"])
def test_gpu_tests_without_a_gpu(required: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GVR_TOPK_REQUIRE_GPU": required}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests/gpu/test_small.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == int(required or 0), done.stdout + done.stderr
    if required:
        assert "GPU tests cannot run: no CUDA GPU" in done.stdout + done.stderr
    else:
        assert re.search(r"\d+ skipped", done.stdout) and "passed" not in done.stdout


def test_make_requires_a_gpu_in_every_run_of_gpu_tests() -> None:
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pytest tests/gpu" in line]
    assert len(lines) == 3 and all(line.strip().startswith("$(REQUIRE_GPU) ") for line in lines)
