"""The two configurations of an A/B comparison may differ in one thing only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.common.prompts import InputError
from gvr_topk.config import ServeConfig, load_config

FLAG = "sparse_attention_config.enable_heuristic_topk"


def check_pair(off: Path, on: Path) -> tuple[ServeConfig, ServeConfig]:
    """Load both sides of a comparison and require that only the heuristic top-k differs.

    Raises
    ------
    InputError
        The flag is not off on one side and on on the other, or another key differs: the comparison
        would measure that as well.
    gvr_topk.config.ConfigError
        A file is missing or wrong.
    """
    config_off, config_on = load_config(off), load_config(on)
    for path, config, wanted in ((off, config_off, False), (on, config_on, True)):
        if config.heuristic_enabled is not wanted:
            raise InputError(f"{path}: {FLAG}: wanted {str(wanted).lower()}, got {str(not wanted).lower()}")
    flat_off, flat_on = _flatten(config_off.model_dump()), _flatten(config_on.model_dump())
    differing = sorted(
        key for key in flat_off.keys() | flat_on.keys() if flat_off.get(key) != flat_on.get(key)
    )
    if differing != [FLAG]:
        rest = ", ".join(key for key in differing if key != FLAG)
        raise InputError(f"{off} and {on}: wanted them to differ in {FLAG} only, got {rest} differing too")
    return config_off, config_on


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
