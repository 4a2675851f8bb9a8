"""Environment variables that all integrations read in one way.

``GVR_TOPK_DISABLE=1``
    Nothing of any engine is touched in this process. The values empty, ``0``, ``false``, ``no`` and ``off``
    count as unset.
``GVR_TOPK_VERIFY=N``, ``TRTLLM_GVR_TOPK_VERIFY=N``
    The first N calls of each op outside of CUDA graphs are compared with the engine's own result. The second
    name also reaches the workers of TensorRT-LLM, which it starts with the variables ``TRTLLM*``.
``GVR_TOPK_VLLM``, ``GVR_TOPK_SGLANG``
    ``0`` off; ``1`` on where the engine chooses the top-k itself; ``force`` on also where another top-k was
    chosen, and in versions that this package does not know, as long as what it hooks fits. Unset is ``1`` for
    vLLM and ``0`` for SGLang.
``GVR_TOPK_VLLM_METRICS_DIR``
    Directory in which every process of vLLM keeps a file of its counters in Prometheus text format.
"""

from __future__ import annotations

import os
from enum import Enum

import gvr_topk_autoload

DISABLE = gvr_topk_autoload.DISABLE
VERIFY = "GVR_TOPK_VERIFY"
VERIFY_TRTLLM = "TRTLLM_GVR_TOPK_VERIFY"
ENABLE_VLLM = "GVR_TOPK_VLLM"
ENABLE_SGLANG = "GVR_TOPK_SGLANG"
VLLM_METRICS_DIR = "GVR_TOPK_VLLM_METRICS_DIR"


class Mode(Enum):
    """The mode that is asked for."""

    OFF = "0"
    ON = "1"
    FORCE = "force"


def disabled() -> bool:
    """Whether ``GVR_TOPK_DISABLE`` keeps us from every layer of this process."""
    return gvr_topk_autoload.disabled()


def user_mode(variable: str) -> Mode | None:
    """Return the mode that a variable of the user asks for; None if it is not set.

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


def verify_calls() -> int:
    """Return how many calls of each op ``GVR_TOPK_VERIFY`` asks to compare; 0 if it is not set.

    Raises
    ------
    ValueError
        The variable does not hold a number of calls.
    """
    name = VERIFY if os.environ.get(VERIFY) else VERIFY_TRTLLM
    value = os.environ.get(name, "").strip()
    if value and not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name}: wanted a number of calls, got {value!r}")
    return int(value or "0")
