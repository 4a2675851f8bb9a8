"""The compiled TensorRT-LLM op, from the wheel that carries it without the rest of TensorRT-LLM."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch

from eval.bench.baselines import ENVIRONMENT, find_file, load_library

PACKAGE = "trtllm_kernel"
"""What the wheel tokenspeed-trtllm-kernel installs."""


def load_real_op() -> str:
    """Load ``torch.ops.trtllm.indexer_topk_decode``: a peer's file of the benchmark, or the wheel's module.

    Returns
    -------
    str
        Empty when it is there; else why not.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        if folder := os.environ.get(ENVIRONMENT):
            load_library(find_file(Path(folder), "libtrtllm_kernel.so"), Path(folder))
        else:
            importlib.import_module(PACKAGE)
    except Exception as error:  # a missing system library shows up in many ways
        return f"{PACKAGE}: {type(error).__name__}: {error}"
    if not hasattr(torch.ops.trtllm, "indexer_topk_decode"):
        return f"{PACKAGE} does not register trtllm::indexer_topk_decode"
    return ""
