"""Options of the measurements that would leave something out in silence are refused."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from eval.common.options import at_least
from eval.common.status import WRONG_USE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["guesses", "--traces", "nowhere"], "'nowhere' does not exist"),
        (["guesses", "--layers", "5", "--device", "cpu"], "--layers: wanted some of"),
        (["guesses", "--generated", "0"], "should be greater than or equal to 1"),
        (["guesses", "--device", "abacus"], "--device: wanted cuda or cpu, got 'abacus'"),
        (["phases", "--traces", "nowhere"], "'nowhere' does not exist"),
        (["bench", "--traces", "nowhere"], "'nowhere' does not exist"),
        (["fuzz", "--device", "cpu", "--seconds", "0"], "should be greater than or equal to 0.001"),
        (["fuzz", "--device", "cpu", "--first", "-5"], "should be greater than or equal to 0"),
        (["decode", "--device", "cpu", "--steps", "2"], "--steps: wanted an integer of at least 3, got '2'"),
        (["decode", "--requests", "0"], "--requests: wanted an integer of at least 1, got '0'"),
        (["vllm-serve", "--length", "-1"], "--length: wanted an integer of at least 1, got '-1'"),
    ],
)
def test_what_would_measure_nothing_is_refused(arguments: list[str], text: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "eval", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == WRONG_USE, run.stderr
    said = " ".join(run.stderr.replace("│", " ").split())
    assert text in said and "Traceback" not in said


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("17", 17)])
def test_integers_from_a_minimum_on(text: str, value: int) -> None:
    assert at_least(3)(text) == value


@pytest.mark.parametrize("text", ["2", "-3", "x", "3.5", ""])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^wanted an integer of at least 3, got '{text}'$"):
        at_least(3)(text)
