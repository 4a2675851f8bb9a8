"""The sizes in docs/architecture.md are those of this tree, which grows by decision only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_include_order import KERNEL_FOLDERS, KERNELS, reachable

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW = re.compile(r"^\| (.+) \| [\d,]+ \| [\d,]+ \| ([\d,]+) \|$", re.MULTILINE)
TODAY = {name: int(number.replace(",", "")) for name, number in ROW.findall(PAGE)}
SOURCES = {".py", ".cu", ".cuh", ".h", ".cpp"}
BUILT = "_build.py"  # the build writes it


@pytest.mark.parametrize("folder", ["cpp/kernels", "gvr_topk", "eval", "eval/common", "tests"])
def test_lines(folder: str) -> None:
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in SOURCES and file.name != BUILT]
    lines = sum(file.read_bytes().count(b"\n") for file in files)
    limit = TODAY[f"lines of `{folder}/`"]
    assert 0.97 * limit < lines <= limit, "docs/architecture.md says how many there are"


def test_files_behind_one_launch() -> None:
    """The launch's own file counts, too."""
    behind = {folder: len(reachable(KERNELS / folder / "launch.cu")) + 1 for folder in KERNEL_FOLDERS}
    assert max(behind.values()) <= TODAY["files of `cpp/kernels` behind one launch"], behind


def test_seconds_that_compile() -> None:
    """Of the newest wheel that was timed, which the log names first."""
    log = (ROOT / "eval" / "results" / "wheel.log").read_text()
    seconds = re.findall(r"(\d+) s of CPU time and (\d+) in the\s+system", log)
    assert sum(map(int, seconds[0])) == TODAY["seconds that one core compiles for three architectures"]
