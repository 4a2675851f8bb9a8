"""Which GPU architectures a build compiles kernels for, and the one line that says so.

    python packaging/gvr_topk_archs.py [native|all|none|LIST]
    python packaging/gvr_topk_archs.py --jobs

The first prints CMake's list of architectures, empty where no kernels are compiled, and the line on stderr.
An argument that is left out or empty is the environment variable ``GVR_TOPK_ARCHS``, by default ``native``:

- ``native``: of the GPUs of this machine; nothing where there is none.
- ``all``: of every GPU that the kernels are written for, as a wheel has them.
- ``none``: nothing. The package then has its CPU implementation alone.
- a list such as ``90a-real;100f-real``, with semicolons, commas or spaces; ``-real`` may be left out.

Without ``nvcc`` (or the compiler that ``CUDACXX`` names) nothing is compiled, whatever is asked for. Where
nothing is compiled and ``none`` was not asked for, the line warns. The second form prints how many compilers
run at once. CMake and the build backend both ask this file, so it imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

ALL = ("90a-real", "100f-real", "120f-real")
"""Hopper, which is run and measured; Blackwell of data centres and of consumers, compiled and inspected."""
OF_CAPABILITY = {
    (9, 0): "90a-real",
    (10, 0): "100f-real",
    (10, 3): "100f-real",
    (12, 0): "120f-real",
    (12, 1): "120f-real",
}

JOB_GIB = 3
"""Memory that one compiler takes at most."""

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
"""Of the driver's enumeration ``CUdevice_attribute``."""


@dataclass(frozen=True)
class Choice:
    """The architectures that a build compiles for, and the line that says why."""

    archs: tuple[str, ...]
    line: str


def cuda_compiler() -> str | None:
    """Path of the CUDA compiler: that of ``CUDACXX``, or ``nvcc`` on PATH; None where there is none."""
    return shutil.which(os.environ.get("CUDACXX") or "nvcc")


def compute_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs here, by ``nvidia-smi`` or else by the driver's library."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return _of_driver()
    found = re.findall(r"^(\d+)\.(\d+)$", printed, re.MULTILINE)
    return [(int(major), int(minor)) for major, minor in found]


def _of_driver() -> list[tuple[int, int]]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for device in range(count.value):
        pair = []
        for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            pair.append(value.value)
        found.append((pair[0], pair[1]))
    return found


def jobs() -> int:
    """How many compilers run at once: ``CMAKE_BUILD_PARALLEL_LEVEL``, or what cores and free memory allow."""
    asked = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    with open("/proc/meminfo", encoding="ascii") as file:
        free = re.search(r"^MemAvailable: +(\d+) kB$", file.read(), re.MULTILINE)
    gib = int(free[1]) / 2**20 if free else JOB_GIB
    return max(1, min(len(os.sched_getaffinity(0)), int(gib / JOB_GIB)))


def choose(wanted: str = "") -> Choice:
    """Choose the architectures.

    Parameters
    ----------
    wanted : str
        As the argument of this program.

    Returns
    -------
    Choice
        The architectures, and one line without a line break.

    Raises
    ------
    ValueError
        An architecture of the list is not one of `ALL`.
    """
    wanted = wanted.strip() or os.environ.get("GVR_TOPK_ARCHS", "").strip() or "native"
    if wanted == "none":
        return Choice((), "no kernels are compiled (GVR_TOPK_ARCHS=none): the CPU implementation only")
    if wanted == "native":
        here = compute_capabilities()
        archs = tuple(arch for arch in ALL if arch in {OF_CAPABILITY.get(each) for each in here})
        if not archs:
            names = ", ".join(f"{major}.{minor}" for major, minor in here)
            why = f"there are none for compute capability {names}" if here else "no GPU is here"
            return Choice(
                (),
                f"WARNING: no kernels are compiled, because {why}: the CPU implementation only "
                "(GVR_TOPK_ARCHS=all compiles for every GPU, GVR_TOPK_ARCHS=90a-real for Hopper)",
            )
    elif wanted == "all":
        archs = ALL
    else:
        named = {part.removesuffix("-real") + "-real" for part in re.split(r"[;, ]+", wanted) if part}
        if not named <= set(ALL):
            raise ValueError(
                f"GVR_TOPK_ARCHS: wanted native, all, none or a list of {', '.join(ALL)}, got {wanted!r}"
            )
        archs = tuple(arch for arch in ALL if arch in named)
    names = ", ".join("sm_" + arch.removesuffix("-real") for arch in archs)
    if cuda_compiler() is None:
        missing = f"CUDACXX={os.environ['CUDACXX']}" if os.environ.get("CUDACXX") else "nvcc"
        why = f"{missing} is not on PATH, and {names} was asked for (GVR_TOPK_ARCHS={wanted})"
        return Choice((), f"WARNING: no kernels are compiled, because {why}: the CPU implementation only")
    count = jobs()
    at_once = f"{count} jobs" if count > 1 else "one job"
    return Choice(
        archs,
        f"compiling kernels for {names} with {at_once} "
        f"(GVR_TOPK_ARCHS={wanted}; GVR_TOPK_ARCHS=none skips it)",
    )


def main(arguments: list[str]) -> None:
    """Command line."""
    if arguments == ["--jobs"]:
        print(jobs())
        return
    try:
        choice = choose(" ".join(arguments))
    except ValueError as error:
        raise SystemExit(f"gvr_topk: {error}") from None
    print(f"gvr_topk: {choice.line}", file=sys.stderr)
    print(";".join(choice.archs))


if __name__ == "__main__":
    main(sys.argv[1:])
