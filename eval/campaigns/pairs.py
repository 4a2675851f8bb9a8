"""The two configurations of an A/B comparison may differ in one thing only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.campaigns.prompts import InputError
from gvr_topk.config import ServeConfig, load_config

FLAG = "sparse_attention_config.enable_heuristic_topk"


def check_pair(off: Path, on: Path) -> tuple[ServeConfig, ServeConfig]:
    """Load both sides of a comparison and require that only the heuristic top-k differs.

    Raises
    ------
    InputError
        The flag is not off on one side and on on the other, or another key differs: the comparison
        would measure that as well. What is written counts, not what it defaults to, for defaults differ
        between versions of TensorRT-LLM.
    gvr_topk.config.ConfigError
        A file is missing or wrong.
    """
    config_off, config_on = load_config(off), load_config(on)
    for path, config, wanted in ((off, config_off, False), (on, config_on, True)):
        if config.heuristic_enabled is not wanted:
            raise InputError(f"{path}: {FLAG}: wanted {str(wanted).lower()}, got {str(not wanted).lower()}")
    flat_off, flat_on = (
        _flatten(config.model_dump(exclude_unset=True)) for config in (config_off, config_on)
    )
    differing = sorted(
        {".".join(key) for key in flat_off.keys() | flat_on.keys() if flat_off.get(key) != flat_on.get(key)}
    )
    rest = ", ".join(key for key in differing if key != FLAG)
    if rest:
        raise InputError(f"{off} and {on}: wanted them to differ in {FLAG} only, got {rest} differing too")
    return config_off, config_on


def _flatten(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Every leaf with its path, spelled so that only the same value of the same type is equal.

    An absent key, null and an empty section are three things to the program that reads them, and so are
    ``true`` and 1.
    """
    if isinstance(value, dict) and value:
        parts = [(str(key) if isinstance(key, str) else repr(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and value:
        parts = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: f"{type(value).__name__} {value!r}"}
    flat: dict[tuple[str, ...], str] = {}
    for key, item in parts:
        flat |= _flatten(item, (*path, key))
    return flat
