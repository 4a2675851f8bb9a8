"""The compiled TensorRT-LLM op, from the package that carries it without the rest of TensorRT-LLM."""

from __future__ import annotations

import importlib

import torch

PACKAGE = "tokenspeed_trtllm_kernel"


def load_real_op() -> str:
    """Load ``torch.ops.trtllm.indexer_topk_decode``.

    Returns
    -------
    str
        Empty when it is there; else why not.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        importlib.import_module(PACKAGE)
    except Exception as error:  # a missing system library shows up in many ways
        return f"{PACKAGE}: {type(error).__name__}: {error}"
    if not hasattr(torch.ops.trtllm, "indexer_topk_decode"):
        return f"{PACKAGE} does not register trtllm::indexer_topk_decode"
    return ""
