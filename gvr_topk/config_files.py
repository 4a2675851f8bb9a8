"""Combine serving configurations from parts: a base, speculative decoding, the heuristic on or off."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gvr_topk.config import MAX_DEPTH, ConfigError, Problem, parse_text, read_text


def combine(files: Sequence[Path]) -> str:
    """Return the text of one YAML file with the keys of several files, which its first line names.

    Sections are combined key by key. If two files set the same key, the later file counts; lists are replaced
    as a whole.

    Raises
    ------
    ValueError
        No file is given.
    gvr_topk.config.ConfigError
        A file is missing or wrong, or the combination is wrong although each file alone is right.
    """
    if not files:
        raise ValueError("files: wanted at least one, got none")
    combined: dict[str, Any] = {}
    for file in files:
        text = read_text(file)
        parse_text(text, str(file))  # the error about a wrong file names the file and the line
        combined = _merge(combined, yaml.safe_load(text) or {}, str(file))
    # A line break in a name would end the comment.
    names = ", ".join(name if name.isprintable() else repr(name) for name in map(str, files))
    text = f"# Combined from {names}\n{yaml.safe_dump(combined, sort_keys=False)}"
    parse_text(text, f"combined from {names}")
    return text


def write_combined(text: str, out: Path, files: Sequence[Path]) -> None:
    """Write what `combine` made of some files to `out`, all of it or nothing.

    A file that exists is replaced, unless it is one of `files` or no regular file.

    Raises
    ------
    ValueError
        `out` is refused or cannot be written.
    """
    target = Path(os.path.realpath(out))  # the file that a link leads to, not the link, is replaced
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists():
            if any(target.samefile(file) for file in files):
                raise ValueError(f"--out: wanted a file other than those that are combined, got {out}")
            if not target.is_file():
                raise ValueError(f"--out: wanted a regular file to write to, got {out}")
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ValueError(f"--out: wanted a file to write to, got {out}: {error.strerror}") from None


def _merge(under: dict[str, Any], over: dict[str, Any], source: str, depth: int = 1) -> dict[str, Any]:
    """Put the keys of a file over others; both may hold aliases that lead back to where they came from."""
    if depth > MAX_DEPTH:
        wanted = f"at most {MAX_DEPTH} levels with aliases followed"
        raise ConfigError([Problem(source, "", wanted, "more")])
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merge(merged[key], value, source, depth + 1) if both else value
    return merged
