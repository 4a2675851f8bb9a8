"""Copies of a fake's sources in which texts are replaced."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path


def edited(source: Path, target: Path, edits: Iterable[tuple[str, str, str]]) -> Path:
    """Copy a folder to `target` and return that; each edit is a file, a text of it, and what replaces it."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in edits:
        text = (target / file).read_text()
        assert old in text, f"{file}: wanted the text {old!r}"
        (target / file).write_text(text.replace(old, new))
    return target
