"""Names of other projects' kernels, with the versions that a result file says were measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

PROJECTS = ("TensorRT-LLM", "vLLM", "FlashInfer", "cuDNN frontend")
_VERSION = re.compile(rf"({'|'.join(PROJECTS)}) (\d+(?:\.\w+)*)")


def versions(described: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Name of each project, with its version where a run measured it, from ``baselines`` of every run."""
    found: dict[str, set[str]] = {project: set() for project in PROJECTS}
    for baselines in described:
        for baseline in baselines.values():
            match = _VERSION.match(baseline["version"])
            if match and not baseline["why_not"]:
                found[match[1]].add(match[2])
    return {project: " ".join([project, *sorted(its)]) for project, its in found.items()}


def peer_names(described: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What a table calls each implementation of another project."""
    named = versions(described)
    return {
        "torch": "torch.topk",
        "trtllm": named["TensorRT-LLM"],
        "vllm": named["vLLM"],
        "flashinfer": f"{named['FlashInfer']} `top_k`",
        "flashinfer_ragged": "FlashInfer, ragged",
        "flashinfer_deterministic": f"{named['FlashInfer']}, deterministic",
        "cudnn": f"{named['cuDNN frontend']} `IndexerTopK`",
    }
