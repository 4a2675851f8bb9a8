"""Environment variables of the vLLM integration, read in one place.

``GVR_TOPK_DISABLE=1``
    Nothing of vLLM is touched in this process.
``GVR_TOPK_VLLM``
    ``0`` off; ``1``, the default, on where vLLM chooses the top-k itself; ``force`` on also where another
    top-k was chosen, and in versions of vLLM that this package does not know, as long as their classes fit.
``GVR_TOPK_VLLM_METRICS_DIR``
    Directory in which every process keeps a file of its counters in Prometheus text format.
"""

from __future__ import annotations

import os

from gvr_topk.integrations.environment import DISABLE, ENABLE_VLLM, Mode, disabled, user_mode

__all__ = ["DISABLE", "ENABLE", "METRICS_DIR", "Mode", "disabled", "metrics_directory", "mode"]

ENABLE = ENABLE_VLLM
METRICS_DIR = "GVR_TOPK_VLLM_METRICS_DIR"


def mode() -> Mode:
    """Return the mode that is asked for.

    Raises
    ------
    ValueError
        ``GVR_TOPK_VLLM`` holds something else than ``0``, ``1`` or ``force``.
    """
    return user_mode(ENABLE) or Mode.ON


def metrics_directory() -> str | None:
    """Where this process keeps its metrics file, if anywhere."""
    return os.environ.get(METRICS_DIR) or None
