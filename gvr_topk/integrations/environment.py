"""Environment variables of the TensorRT-LLM integration, read and written in one place.

``GVR_TOPK_DISABLE=1``
    No layer is touched in this process; our YAML keys are accepted and ignored. The values empty, ``0``,
    ``false``, ``no`` and ``off`` count as unset.
``TRTLLM_GVR_TOPK``
    ``0`` off, ``1`` on, ``force`` on also where TensorRT-LLM would run another top-k of its own. Set by the
    user, never by us; it overrules the YAML.
``TRTLLM_GVR_TOPK_OPTIONS``
    JSON with the keys of the YAML section ``gvr_topk``; it overrules the YAML too.
``TRTLLM_GVR_TOPK_YAML``
    What the YAML that was validated last asks for, as JSON. Set by us, never by the user: worker processes
    are started with the parent's ``TRTLLM*`` variables and nothing else of ours.
``TRTLLM_GVR_TOPK_METRICS_DIR``
    Directory in which every process keeps a file of its counters in Prometheus text format.
``TRTLLM_ENABLE_PDL=1``
    TensorRT-LLM's own variable: its kernels are launched while the previous kernel is still running. Our
    kernels are then launched in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import gvr_topk_autoload

if TYPE_CHECKING:
    from gvr_topk.config import GvrTopkConfig

DISABLE = gvr_topk_autoload.DISABLE
ENABLE = "TRTLLM_GVR_TOPK"
OPTIONS = "TRTLLM_GVR_TOPK_OPTIONS"
ENABLE_VLLM = "GVR_TOPK_VLLM"
YAML = "TRTLLM_GVR_TOPK_YAML"
METRICS_DIR = "TRTLLM_GVR_TOPK_METRICS_DIR"
ENABLE_PDL = "TRTLLM_ENABLE_PDL"


class Mode(Enum):
    """The mode that is asked for."""

    OFF = "0"
    ON = "1"
    FORCE = "force"


def disabled() -> bool:
    """Whether ``GVR_TOPK_DISABLE`` keeps us from every layer of this process."""
    return gvr_topk_autoload.disabled()


def programmatic_launch() -> bool:
    """Whether ``TRTLLM_ENABLE_PDL`` asks for programmatic dependent launch."""
    return os.environ.get(ENABLE_PDL) == "1"


def user_mode(variable: str = ENABLE) -> Mode | None:
    """Return the mode that the user's variable asks for; None if it is not set.

    Raises
    ------
    ValueError
        The variable holds something else than ``0``, ``1`` or ``force``.
    """
    value = os.environ.get(variable, "").strip().lower()
    if not value:
        return None
    try:
        return Mode(value)
    except ValueError:
        raise ValueError(f"{variable}: wanted 0, 1 or force, got {value!r}") from None


def mode() -> Mode:
    """Return the mode that is asked for by the user's variable, or else by the YAML validated last.

    Raises
    ------
    ValueError
        As for `user_mode`.
    """
    if disabled():
        return Mode.OFF
    asked = user_mode()
    if asked is None:
        asked = Mode.ON if _published().get("enable") else Mode.OFF
    return asked


def options() -> GvrTopkConfig:
    """Return the options that reached this process; the defaults if none did."""
    from gvr_topk.config import GvrTopkConfig

    if OPTIONS in os.environ:
        return GvrTopkConfig.model_validate_json(os.environ[OPTIONS] or "{}")
    return GvrTopkConfig.model_validate(_published().get("options") or {})


def describe() -> list[tuple[str, str]]:
    """Describe for ``gvr-topk doctor`` the variables that are set, whether an engine is installed or not.

    Returns
    -------
    list of (str, str)
        Name of each variable that is set, and its value or what is wrong with it.
    """
    from pydantic import ValidationError

    judges: dict[str, Callable[[], object]] = {
        DISABLE: disabled,
        ENABLE: user_mode,
        OPTIONS: options,
        ENABLE_VLLM: lambda: user_mode(ENABLE_VLLM),
    }
    rows = []
    for variable, judge in judges.items():
        if variable not in os.environ:
            continue
        text = os.environ[variable]
        try:
            judge()
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            text = f"refused: wanted the keys of section gvr_topk as JSON, got {text!r} ({reason})"
        except ValueError as error:
            text = f"refused: {error}"
        if variable == DISABLE:
            text += ": no engine is touched" if disabled() else ": counts as unset"
        rows.append((variable, text))
    return rows


def metrics_directory() -> str | None:
    """Where this process keeps its metrics file, if anywhere."""
    return os.environ.get(METRICS_DIR) or None


def publish(enable: bool | None = None, options: Mapping[str, Any] | None = None) -> None:
    """Publish what a validated configuration asks for to this process's hook and to its workers.

    Parameters
    ----------
    enable : bool, optional
        ``enable_heuristic_topk``; None keeps what is published.
    options : mapping, optional
        The section ``gvr_topk``, checked here; an empty one withdraws earlier options, None keeps them.
    """
    from gvr_topk.config import GvrTopkConfig

    published = _published()
    if enable is not None:
        published["enable"] = enable
    if options is not None:
        published["options"] = GvrTopkConfig.model_validate(options).model_dump(exclude_unset=True)
    if any(published.values()):
        os.environ[YAML] = json.dumps(published)
    else:
        withdraw()


def withdraw() -> None:
    """Withdraw what was published."""
    os.environ.pop(YAML, None)


def _published() -> dict[str, Any]:
    published: dict[str, Any] = json.loads(os.environ.get(YAML) or "{}")
    return published
