"""Environment variables of the integrations, as docs/interface.md lists them, and what each of them says.

The values empty, ``0``, ``false``, ``no`` and ``off`` of ``GVR_TOPK_DISABLE`` count as unset. Worker
processes of TensorRT-LLM are started with the parent's ``TRTLLM*`` variables and nothing else of ours: what
has to reach them has such a name, and under ``GVR_TOPK_DISABLE`` we set ``TRTLLM_GVR_TOPK`` to ``0`` there.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import gvr_topk_autoload

if TYPE_CHECKING:
    from gvr_topk.config import GvrTopkConfig

disabled = gvr_topk_autoload.disabled
"""Whether ``GVR_TOPK_DISABLE`` keeps us from every layer of this process."""

DISABLE = gvr_topk_autoload.DISABLE
VERIFY = "GVR_TOPK_VERIFY"
VERIFY_TRTLLM = "TRTLLM_GVR_TOPK_VERIFY"
ENABLE_VLLM = "GVR_TOPK_VLLM"
ENABLE_SGLANG = "GVR_TOPK_SGLANG"
ENABLE_SAMPLER = "GVR_TOPK_SAMPLER"
ENABLE_SLICES = "GVR_TOPK_VLLM_SLICES"
ENABLE_DCP = "GVR_TOPK_VLLM_DCP"
METRICS_DIR_VLLM = "GVR_TOPK_VLLM_METRICS_DIR"
ENABLE_TRTLLM = "TRTLLM_GVR_TOPK"
ENABLE_SAMPLER_TRTLLM = "TRTLLM_GVR_TOPK_SAMPLER"
OPTIONS = "TRTLLM_GVR_TOPK_OPTIONS"
YAML = "TRTLLM_GVR_TOPK_YAML"
METRICS_DIR_TRTLLM = "TRTLLM_GVR_TOPK_METRICS_DIR"
ENABLE_PDL = "TRTLLM_ENABLE_PDL"


class Mode(Enum):
    """The mode that is asked for."""

    OFF = "0"
    ON = "1"
    FORCE = "force"


def user_mode(variable: str) -> Mode | None:
    """Return the mode that a variable of the user asks for; None if it is not set.

    A `ValueError` if it holds something else than ``0``, ``1`` or ``force``.
    """
    value = os.environ.get(variable, "").strip().lower()
    if not value:
        return None
    modes = {mode.value: mode for mode in Mode}
    if value not in modes:
        *wanted, last = modes
        raise ValueError(f"{variable}: wanted {', '.join(wanted)} or {last}, got {value!r}")
    return modes[value]


def asks_for(variable: str, default: Mode = Mode.OFF) -> bool:
    """Whether a variable switches something on, as `default` does where it is not set; see `user_mode`."""
    return (user_mode(variable) or default) is not Mode.OFF


def verify_calls() -> int:
    """Return how many calls of each op ``GVR_TOPK_VERIFY`` asks to compare; 0 if it is not set.

    A `ValueError` if it does not hold a number of calls.
    """
    name = VERIFY if os.environ.get(VERIFY) else VERIFY_TRTLLM
    value = os.environ.get(name, "").strip()
    if value and not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name}: wanted a number of calls, got {value!r}")
    return int(value or "0")


def programmatic_launch() -> bool:
    """Whether ``TRTLLM_ENABLE_PDL`` asks for programmatic dependent launch."""
    return os.environ.get(ENABLE_PDL) == "1"


def mode() -> Mode:
    """Return what ``TRTLLM_GVR_TOPK`` asks for, or else the YAML that was validated last; see `user_mode`."""
    if disabled():
        return Mode.OFF
    asked = user_mode(ENABLE_TRTLLM)
    if asked is None:
        asked = Mode.ON if _published().get("enable") else Mode.OFF
    return asked


def options() -> GvrTopkConfig:
    """Return the options of TensorRT-LLM's integration that reached this process; the defaults if none did.

    A `ValueError` if the user's variable does not hold the keys of section ``gvr_topk``.
    """
    from pydantic import ValidationError

    from gvr_topk.config import GvrTopkConfig

    if OPTIONS not in os.environ:
        return GvrTopkConfig.model_validate(_published().get("options") or {})
    text = os.environ[OPTIONS]
    try:
        return GvrTopkConfig.model_validate_json(text or "{}")
    except ValidationError as error:
        wanted = f"{OPTIONS}: wanted the keys of section gvr_topk as JSON"
        raise ValueError(f"{wanted}, got {text!r} ({error.errors()[0]['msg']})") from None


def describe() -> list[tuple[str, str]]:
    """Describe for ``gvr-topk doctor`` the variables that are set, whether an engine is installed or not.

    The second text of a pair is the variable's value, or what is wrong with it.
    """
    modes = (ENABLE_VLLM, ENABLE_SGLANG, ENABLE_SAMPLER, ENABLE_SLICES, ENABLE_DCP, ENABLE_SAMPLER_TRTLLM)
    judges: dict[str, Callable[[], object]] = {
        DISABLE: disabled,
        ENABLE_TRTLLM: functools.partial(user_mode, ENABLE_TRTLLM),
        OPTIONS: options,
        **{each: functools.partial(user_mode, each) for each in modes},
        VERIFY: verify_calls,
        VERIFY_TRTLLM: verify_calls,
    }
    rows = []
    for variable, judge in judges.items():
        if variable not in os.environ:
            continue
        text = os.environ[variable]
        try:
            judge()
        except ValueError as error:
            text = f"refused: {error}"
        if variable == DISABLE:
            text += ": no engine is touched" if disabled() else ": counts as unset"
        rows.append((variable, text))
    return rows


def publish(enable: bool | None = None, options: Mapping[str, Any] | None = None) -> None:
    """Publish what a validated configuration asks for to this process's hook and to its workers.

    What is None stays as it was published. The options are checked here; empty ones withdraw earlier ones.
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
    """Read what was published; nothing where the variable holds what only another package can have left."""
    from gvr_topk.config import GvrTopkConfig

    try:
        published = json.loads(os.environ.get(YAML) or "{}")
        known = published.keys() <= {"enable", "options"} and isinstance(published.get("enable", False), bool)
        GvrTopkConfig.model_validate(published.get("options", {}))
    except (ValueError, AttributeError, RecursionError):
        return {}
    return published if known else {}
