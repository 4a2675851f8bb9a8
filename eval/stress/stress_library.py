"""The compiled helpers of stress runs: the library of neighbours, and what a chaos build exports."""

import ctypes
import functools
import os
from pathlib import Path

import torch
from torch import Tensor

import gvr_topk
from eval.common.paths import ROOT

NEIGHBOURS_LIBRARY = "libgvr_topk_neighbours.so"

HOW_TO_BUILD = "make neighbours"
"""Command that builds the library of neighbours and puts it beside the others."""

CHAOS_MODES = (
    "off",
    "random",
    "last CTA of a cluster late",
    "first CTA of a cluster late",
    "one warp late",
    "all warps but one late",
    "a roaming CTA late",
    "every second row late",
)
"""What a chaos build delays, by mode (cpp/stress/chaos_modes.h)."""


class StressError(RuntimeError):
    """A compiled helper is missing or a call of it failed."""


@functools.cache
def neighbours_library() -> ctypes.CDLL | None:
    """Load the library of neighbours: of the folder that chooses the op's libraries, or of this checkout.

    None where it was not built (CMake option ``GVR_TOPK_STRESS``).
    """
    chosen = os.environ.get("GVR_TOPK_LIBRARY_DIR")
    folders = [*([Path(chosen).absolute()] if chosen else []), ROOT / "gvr_topk" / "lib"]
    file = next((path for folder in folders if (path := folder / NEIGHBOURS_LIBRARY).is_file()), None)
    if file is None:
        return None
    library = ctypes.CDLL(str(file))
    pointer, i32, i64, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    library.gvr_topk_hold_sms.argtypes = [pointer, i32, i32, real]
    library.gvr_topk_hammer_shared.argtypes = [pointer, i32, real]
    library.gvr_topk_hammer_l1.argtypes = [pointer, i32, real, pointer, i64]
    library.gvr_topk_stream_dram.argtypes = [pointer, i32, real, pointer, i64]
    log = (pointer, pointer, i64)
    library.gvr_topk_stamp.argtypes = (pointer, *log, i32)
    library.gvr_topk_rewrite.argtypes = (pointer, i32, i32, real, pointer, i64, i64, i64, pointer, i64, *log)
    library.gvr_topk_check_words.argtypes = [pointer, pointer, pointer, pointer, i32, pointer]
    return library


def succeed(status: int) -> None:
    """Raise `StressError` unless a CUDA status says success."""
    if status != 0:
        raise StressError(f"a kernel of {NEIGHBOURS_LIBRARY} was not launched: CUDA status {status}")


class TimeLog:
    """The first pairs of numbers, of a time and another, that kernels of the library of neighbours write."""

    def __init__(self, pairs: int = 1 << 20) -> None:
        self._times = torch.zeros(pairs, 2, dtype=torch.int64, device="cuda")
        self._count = torch.zeros(1, dtype=torch.int64, device="cuda")

    @property
    def arguments(self) -> tuple[int, int, int]:
        """What a function of the library takes."""
        return self._times.data_ptr(), self._count.data_ptr(), self._times.numel()

    def clear(self) -> None:
        self._count.zero_()

    def pairs(self) -> Tensor:
        """What was written down, ``[pairs, 2]``; waits for the device."""
        return self._times[: int(self._count) // 2]


def launches_within(stamps: Tensor, intervals: Tensor) -> tuple[int, int]:
    """How many launches there were, and how many of them ran wholly within one of some intervals.

    Stamps are a time between any two launches of a stream, and whether no launch ends there; intervals are
    in order.
    """
    times, begins = stamps.unbind(dim=1)
    launches = torch.stack([times[:-1], times[1:]])[:, begins[1:] == 0]
    if not len(intervals):
        return launches.shape[1], 0
    which = torch.searchsorted(intervals[:, 0].contiguous(), launches[0].contiguous(), right=True) - 1
    inside = (which >= 0) & (launches[1] <= intervals[which, 1])
    return launches.shape[1], int(inside.sum())


@functools.cache
def op_library() -> ctypes.CDLL | None:
    path = gvr_topk.library_status().path
    return None if path is None else ctypes.CDLL(path)


def chaos_modes() -> int:
    """Modes of the loaded library, 0 (off) among them; 0 where it is not a chaos build.

    A chaos build is one with the CMake option ``GVR_TOPK_CHAOS``.
    """
    library = op_library()
    if library is None or not hasattr(library, "gvr_topk_chaos_modes"):
        return 0
    return int(library.gvr_topk_chaos_modes())


def chaos_files() -> int:
    """CUDA files of the loaded library that delay threads."""
    library = op_library()
    return int(library.gvr_topk_chaos_files()) if library is not None and chaos_modes() else 0


def set_chaos(mode: int) -> None:
    """Delay threads of all later launches as a mode of `CHAOS_MODES` says. Waits for the device."""
    library = op_library()
    if library is None or not 0 <= mode < chaos_modes():
        raise StressError(f"mode: wanted one of the {chaos_modes()} modes of the library, got {mode}")
    torch.cuda.synchronize()
    status = library.gvr_topk_set_chaos(mode)
    if status != 0:
        raise StressError(f"gvr_topk_set_chaos({mode}): CUDA status {status}")
    torch.cuda.synchronize()
