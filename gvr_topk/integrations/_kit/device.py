"""Questions about the device of a call."""

from __future__ import annotations

import functools

import torch


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def arch_of(device: torch.device) -> int:
    """Return the compute capability of a CUDA device times ten; 0 for any other device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 1 for any other device."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
