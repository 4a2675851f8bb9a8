"""Options of the measurements that would leave something out in silence are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from eval.common.options import no_gpu, require_writable
from eval.common.status import WRONG_USE

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = "tests/data/eval_samples/prompts.jsonl"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fuzz", "--device", "abacus"], "--device: wanted cuda or cpu, got 'abacus'"),
        (["phases", "--traces", "nowhere"], "'nowhere' does not exist"),
        (["bench", "--traces", "nowhere"], "'nowhere' does not exist"),
        (["fuzz", "--device", "cpu", "--seconds", "0"], "should be greater than or equal to 0.001"),
        (["fuzz", "--device", "cpu", "--seed", "-5"], "should be greater than or equal to 0"),
        (["fuzz", "--device", "cpu", "--seed", "100000000000000000000"], "should be less than or equal to"),
        (["compare", "nofile"], "nofile: wanted a result file, got no such file"),
        (
            ["tpot", "--model", "m", "--prompts", f"a={PROMPTS}", "--entry", "0", "--mtp", "7"],
            "--mtp: wanted one of 0, 1, 3 (--configs names other configurations), got 7",
        ),
        (["decode", "--device", "cpu", "--steps", "2"], "should be greater than or equal to 3"),
        (["decode", "--requests", "0"], "should be greater than or equal to 1"),
    ],
)
def test_what_would_measure_nothing_is_refused(arguments: list[str], text: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "eval", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == WRONG_USE, run.stderr
    said = " ".join(run.stderr.replace("│", " ").split())
    assert text in said and "Traceback" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["fuzz", "--device", "cpu", "--seconds", "1", "--out"],
        ["host", "--device", "cpu", "--out"],
        ["decode", "--device", "cpu", "--out"],
        ["inspect", "--record"],
    ],
)
def test_results_that_cannot_be_written_are_refused_at_once(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out.json")
    run = subprocess.run(
        [sys.executable, "-m", "eval", *arguments, out], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout) == (WRONG_USE, "")
    said = " ".join(run.stderr.replace("│", " ").split())
    assert f"{arguments[-1]}: wanted a file that can be written, got" in said and "Traceback" not in said


def test_trying_a_result_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("before")
    require_writable(old)
    require_writable(new)
    assert old.read_text() == "before" and not new.exists() and new.parent.is_dir()
    with pytest.raises(typer.BadParameter, match=f"got {tmp_path}"):
        require_writable(tmp_path)


def test_default_result_files_lie_in_the_ignored_folder() -> None:
    options = re.compile(r'Path\(\s*"([^"]+\.(?:json|png))"')
    found = [name for file in (ROOT / "eval").glob("*/*.py") for name in options.findall(file.read_text())]
    assert len(found) > 3 and {name for name in found if not name.startswith("out/")} == set()


def test_one_sentence_for_a_missing_gpu() -> None:
    assert no_gpu() == "GPU: wanted a CUDA GPU, got none"
    assert no_gpu("--device") == "--device: wanted a CUDA GPU, got none; --device cpu runs without"
    said = [file for file in (ROOT / "eval").rglob("*.py") if "wanted a CUDA" in file.read_text()]
    assert [file.name for file in said] == ["options.py"]
