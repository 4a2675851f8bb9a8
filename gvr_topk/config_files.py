"""Combine serving configurations from parts: a base, speculative decoding, the heuristic on or off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gvr_topk.config import ConfigError, Problem, parse_text, read_text


def combine(files: Sequence[Path]) -> str:
    """Return the text of one YAML file with the keys of several files, which its first line names.

    Sections are combined key by key. If two files set the same key, the later file counts; lists are replaced
    as a whole. A `ConfigError` says which file is missing or wrong, or that the combination is.
    """
    if not files:
        raise ValueError("files: wanted at least one, got none")
    combined: dict[str, Any] = {}
    for file in files:
        text = read_text(file)
        parse_text(text, str(file))  # the error about a wrong file names the file and the line
        try:
            combined = _merge(combined, yaml.safe_load(text))
        except RecursionError:
            wanted = "sections that can be combined key by key"
            problem = Problem(str(file), "", wanted, "an alias that leads back to its own section")
            raise ConfigError([problem]) from None
    # A line break in a name would end the comment.
    names = ", ".join(name if name.isprintable() else repr(name) for name in map(str, files))
    text = f"# Combined from {names}\n{yaml.safe_dump(combined, sort_keys=False)}"
    parse_text(text, f"combined from {names}")
    return text


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Put the keys of a file over others."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
