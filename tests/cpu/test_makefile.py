"""The Makefile: every target explains itself, and cleaning leaves results and the installation alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def make(*arguments: str) -> str:
    # Not as a make within `make test`, which would say which folders it enters.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, env=outside
    )
    return done.stdout


def test_help_lists_every_target() -> None:
    listed = {line.split()[1]: line.split(maxsplit=2)[2] for line in make("help").splitlines()}
    assert set(listed) == TARGETS
    assert all(len(text) > 10 for text in listed.values())
    assert {
        line.index(text) for line, text in zip(make("help").splitlines(), listed.values(), strict=True)
    } == {24}
    assert make() == make("help")


def test_targets_are_no_files() -> None:
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).replace("\\", " ").split()) == TARGETS


def test_clean_leaves_results_and_libraries(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept = [tmp_path / "out" / "result.json", tmp_path / "gvr_topk" / "lib" / "library.so"]
    built = [tmp_path / "build" / "x", tmp_path / "dist" / "x"]
    for path in (*kept, *built):
        path.parent.mkdir(parents=True)
        path.touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert [path.exists() for path in (*kept, *built)] == [True, True, False, False]
