"""Sources of fakes: copies in which texts are replaced, and a process that can import them."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def edited(source: Path, target: Path, edits: Iterable[tuple[str, str, str]]) -> Path:
    """Copy a folder to `target` and return that; each edit is a file, a text of it, and what replaces it."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in edits:
        text = (target / file).read_text()
        assert old in text, f"{file}: wanted the text {old!r}"
        (target / file).write_text(text.replace(old, new))
    return target


@contextmanager
def importable(packages: tuple[str, ...], *folders: Path) -> Iterator[None]:
    """Let packages be imported from folders; afterwards no trace of them is left."""
    paths = [str(folder) for folder in folders]
    sys.path[:0] = paths
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        forget(packages)


def forget(packages: tuple[str, ...]) -> None:
    """Take all modules of packages out of those that are loaded."""
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]
