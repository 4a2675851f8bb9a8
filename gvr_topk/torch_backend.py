"""Opt-in: serve ``torch.topk`` on GPUs with `gvr_topk.topk`, without a change of the code that calls it.

`enable` registers a kernel for ``aten::topk`` in torch's dispatcher, for CUDA tensors. It serves the calls
that `_serves` names and hands all others to the kernel that was there before. Gradients, autocast,
``torch.compile`` and fake tensors are torch's as before: only the kernel that a call ends in is another.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from gvr_topk.library import LibraryError, library_status
from gvr_topk.policy import gpu_arch, has_code
from gvr_topk.torch_topk import op_serves, topk

_KEY = "CUDA"

_registered: list[torch.library.Library] = []
"""The registration, while it is in force."""


def enable() -> None:
    """Serve ``torch.topk`` of CUDA tensors with `gvr_topk.topk`, in this process, until `disable`.

    Raises
    ------
    LibraryError
        The CUDA library is not available.
    RuntimeError
        This torch cannot name the kernel that is replaced: it has no ``torch.library.get_kernel``.

    Notes
    -----
    Served are calls with ``largest=True`` and without ``out=`` for which `gvr_topk.topk` calls its op,
    on a GPU that the library has code for. They return what `gvr_topk.topk` returns. Where other code has
    replaced the kernel too, the last one to do so is called first. ``torch.kthvalue`` stays as it is.

    The kernel is called through Python, which costs the host time in each call of ``torch.topk`` that no CUDA
    graph replays.
    """
    if _registered:
        return
    status = library_status()
    if not status.loaded:
        raise LibraryError(f"gvr_topk.torch_backend.enable: CUDA library: {status.reason}")
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"gvr_topk.torch_backend.enable: torch: wanted torch.library.get_kernel, got {torch.__version__}"
        )
    before = torch.library.get_kernel("aten::topk", _KEY)

    def kernel(
        keys: Any, self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[Tensor, Tensor]:
        if _serves(self, k, dim, largest):
            return topk(self.detach(), k, dim, largest, sorted)  # the gradient is torch's
        values, indices = before.call_boxed(keys, self, k, dim, largest, sorted)
        return values, indices

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # which say that a kernel is replaced
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("topk", kernel, _KEY, with_keyset=True)
    _registered.append(library)


def disable() -> None:
    """Let ``torch.topk`` run the kernel that it ran before `enable`."""
    while _registered:
        _registered.pop()._destroy()


def _serves(scores: Tensor, k: int, dim: int, largest: bool) -> bool:
    """Whether `topk` selects these items with the op; what is wrong is left to torch, which says so."""
    if not (largest and -scores.dim() <= dim < scores.dim() and 1 <= k <= scores.shape[dim]):
        return False
    return op_serves(scores.movedim(dim, -1), k) and _has_code(scores.device)


@functools.cache
def _has_code(device: torch.device) -> bool:
    """Whether the library has code for a GPU."""
    arch = gpu_arch(device)
    return arch is not None and has_code(arch)
