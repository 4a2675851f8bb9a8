"""Environment variables of the TensorRT-LLM integration, read and written in one place.

``GVR_TOPK_DISABLE=1``
    Nothing is loaded or changed in this process. Empty, ``0``, ``false``, ``no`` and ``off`` are as if it
    were unset.
``TRTLLM_GVR_TOPK``
    ``0`` off, ``1`` on, ``force`` on also where TensorRT-LLM would run its own heuristic top-k. Unset,
    the YAML key ``enable_heuristic_topk`` decides, and writes its answer here: worker processes are
    started with the parent's ``TRTLLM*`` variables and nothing else of ours. Set by the user, it
    overrules the YAML.
``TRTLLM_GVR_TOPK_OPTIONS``
    The YAML section ``gvr_topk`` as JSON, carried the same way.
``TRTLLM_GVR_TOPK_METRICS_DIR``
    Directory in which every process keeps a file of its counters in Prometheus text format.
``TRTLLM_ENABLE_PDL=1``
    TensorRT-LLM's own: its kernels are launched while the one before is still running. Ours are then too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import gvr_topk_autoload

if TYPE_CHECKING:
    from gvr_topk.config import GvrTopkConfig

DISABLE = gvr_topk_autoload.DISABLE
ENABLE = "TRTLLM_GVR_TOPK"
OPTIONS = "TRTLLM_GVR_TOPK_OPTIONS"
METRICS_DIR = "TRTLLM_GVR_TOPK_METRICS_DIR"
ENABLE_PDL = "TRTLLM_ENABLE_PDL"

_written: dict[str, str] = {}
"""What this process wrote, so that a value of the user is never overwritten."""


class Mode(Enum):
    """What was asked for."""

    OFF = "0"
    ON = "1"
    FORCE = "force"


def disabled() -> bool:
    """Whether ``GVR_TOPK_DISABLE`` switches everything off in this process."""
    return gvr_topk_autoload.disabled()


def programmatic_launch() -> bool:
    """Whether ``TRTLLM_ENABLE_PDL`` asks for programmatic dependent launch."""
    return os.environ.get(ENABLE_PDL) == "1"


def mode() -> Mode:
    """What the environment asks for.

    Raises
    ------
    ValueError
        ``TRTLLM_GVR_TOPK`` holds something else than ``0``, ``1`` or ``force``.
    """
    if disabled():
        return Mode.OFF
    value = os.environ.get(ENABLE, "").strip().lower() or "0"
    try:
        return Mode(value)
    except ValueError:
        raise ValueError(f"{ENABLE}: wanted 0, 1 or force, got {value!r}") from None


def options() -> GvrTopkConfig:
    """The YAML section ``gvr_topk`` that reached this process; its defaults if none did."""
    from gvr_topk.config import GvrTopkConfig

    return GvrTopkConfig.model_validate_json(os.environ.get(OPTIONS) or "{}")


def metrics_directory() -> str | None:
    """Where this process keeps its metrics file, if anywhere."""
    return os.environ.get(METRICS_DIR) or None


def publish_enabled(value: bool) -> None:
    """Carry ``enable_heuristic_topk`` to this process's hook and to its workers."""
    if value:
        _write(ENABLE, Mode.ON.value)
    else:
        _withdraw(ENABLE)


def publish_options(value: Mapping[str, Any] | None) -> None:
    """Carry the section ``gvr_topk``, checked, to this process's hook and to its workers."""
    from gvr_topk.config import GvrTopkConfig

    if value is None:
        _withdraw(OPTIONS)
    else:
        _write(OPTIONS, json.dumps(GvrTopkConfig.model_validate(value).model_dump()))


def withdraw_all() -> None:
    """Remove what this process wrote."""
    for name in list(_written):
        _withdraw(name)


def _write(name: str, value: str) -> None:
    if name in os.environ and os.environ[name] != _written.get(name):
        return
    os.environ[name] = _written[name] = value


def _withdraw(name: str) -> None:
    if name in _written and os.environ.get(name) == _written.pop(name):
        del os.environ[name]
