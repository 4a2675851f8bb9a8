"""The gate and the plan of ``cpp/include/gvr_topk/policy.h``, as Python values.

There is one definition of both, in C++; this module only names its arguments and results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from gvr_topk.arguments import PAPER_K, Checks, either
from gvr_topk.constants import (
    MAX_CLUSTER_SIZE,
    MAX_ROWS,
    MAX_WIDTH,
    PAPER_MAX_WIDTH,
    Family,
    HintReason,
    Path,
    PlanProblem,
)
from gvr_topk.contract import DTYPES
from gvr_topk.library import LibraryError, library_status, policy_library

_CHECKS = Checks()
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1


def paths_by_name(paths: Iterable[Path]) -> dict[str, Path]:
    """Return paths by their names in lower case."""
    return {path.name.lower(): path for path in paths}


ALL_PATHS = paths_by_name(Path)
"""Paths of the decode op."""


def parse_path(name: str | Path, paths: Mapping[str, Path] = ALL_PATHS) -> Path:
    """Return the path with this name, one of those of the op that is asked for; a `Path` stays as it is.

    Another name is a `ValueError`.
    """
    try:
        return paths[name.name.lower() if isinstance(name, Path) else name]
    except (KeyError, TypeError):
        wanted = ", ".join(repr(known) for known in paths)
        raise ValueError(f"path: wanted one of {wanted}, got {name!r}") from None


def asks_for_hint(path: Path) -> bool:
    """Whether a path reads the state of the last step where the gate allows it."""
    return path in (Path.AUTO, Path.PAPER_GVR)


@dataclass(frozen=True)
class GateDecision:
    """Outcome of `can_use_heuristic`."""

    code: HintReason
    """The reason, as kernels write it to the statistics."""

    @property
    def allowed(self) -> bool:
        """Whether the state of the last step is used."""
        return self.code is HintReason.USED

    @property
    def reason(self) -> str:
        """Lower-case name of `code`, fit for a counter's label."""
        return self.code.name.lower()


@dataclass(frozen=True)
class Plan:
    """How a call is launched: printable, and the same values that the kernels are launched with."""

    path: str
    family: str
    """Kernel: ``small_row`` (one CTA), ``resident`` (the row in registers of a cluster), ``streaming``,
    ``fallback`` (any row), or ``paper_gvr``."""
    ctas_per_row: int
    threads: int
    values_per_thread: int
    list_capacity: int
    """Keys inside the predicted interval that all CTAs of a row can list together, each an equal share."""
    ring_depth: int
    """Tiles per warp that are being loaded at once in kernels that walk a long row."""
    staged: int
    """Results of one row that can be staged in shared memory: the lesser of ``k`` and the width."""


def can_use_heuristic(
    *,
    length: int,
    k: int,
    enabled: bool = True,
    has_state: bool = True,
    slot: int = 0,
    slots: int = 1,
    min_length: int = 0,
    max_length: int = MAX_WIDTH,
    known: bool = True,
) -> GateDecision:
    """Decide whether the state of the last step is used for a row, and say why.

    The kernels call the same function for each row and write its reason to the statistics. Of the paper's
    seven conditions (section 5.5) only those remain that our kernels need: these select any k on every
    supported GPU, and their prediction pays at every length.

    Parameters
    ----------
    length, k : int
        The row's own length, in elements, and items per row.
    enabled, has_state, known : bool
        Whether the configuration and the path ask for the hint, the call has a state, and a step has left
        something in the slot.
    slot, slots : int
        Slot of the row, and number of slots.
    min_length, max_length : int
        Limits of the configuration.

    Returns
    -------
    GateDecision

    Raises
    ------
    ValueError
        A length or a number of slots is no integer of 64 bits, `k` is out of range, or another argument is no
        bool.

    Examples
    --------
    >>> can_use_heuristic(length=70690, k=2048).reason
    'used'
    >>> can_use_heuristic(length=70690, k=2048, slot=-1).reason
    'no_slot'
    """
    code = policy_library().gvr_topk_can_use_heuristic(
        _CHECKS.flag("enabled", enabled),
        _CHECKS.flag("has_state", has_state),
        _number("slot", slot),
        _number("slots", slots),
        _number("length", length),
        _CHECKS.integer("k", k, 1, MAX_WIDTH),
        _number("min_length", min_length),
        _number("max_length", max_length),
        _CHECKS.flag("known", known),
    )
    return GateDecision(HintReason(code))


def _number(name: str, value: int) -> int:
    """Check an integer that the library takes in 64 bits; others would wrap on the way."""
    return _CHECKS.integer(name, value, -_INT64_MAX - 1, _INT64_MAX)


def architectures(*, all_builds: bool = False) -> str:
    """Return the GPU architectures that this installation is compiled for, such as ``90a 100f 120f``.

    Parameters
    ----------
    all_builds : bool
        Those that there are kernels for instead, some of which a build may leave out.
    """
    return str(policy_library().gvr_topk_archs(all_builds).decode())


def has_code(arch: int, *, all_builds: bool = False) -> bool:
    """Whether the CUDA library holds code for a GPU of this compute capability times ten.

    With `all_builds`, a library that no architecture is left out of is meant.

    Examples
    --------
    >>> has_code(80), has_code(110), has_code(103, all_builds=True)
    (False, False, True)
    """
    arch = _CHECKS.integer("arch", arch, 1, _INT32_MAX)
    return bool(policy_library().gvr_topk_has_code(arch, architectures(all_builds=all_builds).encode()))


def _no_code(arch: int, all_builds: bool = False) -> str:
    """Say that there is no code for a GPU, and for which there is; empty if there is."""
    if has_code(arch, all_builds=all_builds):
        return ""
    held = architectures(all_builds=all_builds)
    return f"wanted a GPU that the library holds code for ({held}), got compute capability {arch / 10}"


def gpu_arch(device: torch.device | int | None = None) -> int | None:
    """Return the compute capability of a GPU times ten, by default of the current one; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def no_gpu_reason() -> str:
    """Say why torch has no GPU, where it has none."""
    return "torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"


def no_kernels_reason(device: torch.device | int | None = None) -> str:
    """Say why no kernel can run on a GPU; empty if kernels can.

    Parameters
    ----------
    device : torch.device or int, optional
        Default: the current CUDA device.
    """
    status = library_status()
    if not status.loaded:
        return f"the CUDA library is not usable: {status.reason}"
    arch = gpu_arch(device)
    if arch is None:
        return no_gpu_reason()
    try:
        return _no_code(arch)
    except LibraryError as error:
        return str(error)


def plan(
    *,
    rows: int,
    width: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    path: str | Path = "auto",
    sm_count: int = 132,
    arch: int = 90,
    ctas_per_row: int = 0,
    max_ctas: int = 0,
    aligned: bool = True,
) -> Plan:
    """Say how a call of this shape is launched.

    Parameters
    ----------
    rows, width, k, dtype, path, max_ctas
        As the decode op has them; `width` is that of the buffer.
    sm_count : int
        Multiprocessors that the stream may use: 132 on a whole H200, fewer in a green context.
    arch : int
        Compute capability times ten, of a GPU that there are kernels for.
    ctas_per_row : int
        Force the cluster size (1, 2, 4, 8 or 16); 0 lets the plan decide.
    aligned : bool
        Whether every row starts at a 16-byte boundary. If not, registers have room for what is read ahead
        of each row, up to 127 bytes.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        A size is no integer or out of range, `aligned` is no bool, or `dtype` is none that the op takes;
        `ctas_per_row` is not a size that the GPU offers, is too small for `width` or is above `max_ctas`;
        `max_ctas` is not a cluster size; or path ``"paper_gvr"`` does not serve this `k`, `width` or `arch`.
    """
    checks = _CHECKS
    rows, width = checks.integer("rows", rows, 0, MAX_ROWS), checks.integer("width", width, 0, MAX_WIDTH)
    k = checks.integer("k", k, 1, MAX_WIDTH)
    sm_count, arch = checks.integer("sm_count", sm_count, 1), checks.integer("arch", arch, 1)
    ctas_per_row = checks.integer("ctas_per_row", ctas_per_row)
    max_ctas, aligned = checks.integer("max_ctas", max_ctas), checks.flag("aligned", aligned)
    for name, number in (("sm_count", sm_count), ("arch", arch)):
        if number > _INT32_MAX:
            raise checks.fail(name, f"at most {_INT32_MAX}", number)
    if no_code := _no_code(arch, all_builds=True):
        raise ValueError(f"arch: {no_code}")
    if dtype not in DTYPES:
        raise checks.fail("dtype", "torch.float32, torch.bfloat16 or torch.float16", repr(dtype))
    planned = (ctypes.c_int32 * 8)()
    status = policy_library().gvr_topk_make_plan(
        rows,
        width,
        k,
        DTYPES.index(dtype),
        parse_path(path),
        sm_count,
        arch,
        # The library names wrong sizes; those beyond 32 bits become the nearest that it finds wrong.
        max(-1, min(ctas_per_row, MAX_CLUSTER_SIZE + 1)),
        max(-1, min(max_ctas, MAX_CLUSTER_SIZE + 1)),
        aligned,
        planned,
    )
    problems = {
        PlanProblem.CTAS: (
            f"ctas_per_row: wanted 0, 1, 2, 4, 8 or 16 and enough for width {width}, got {ctas_per_row}"
        ),
        PlanProblem.PAPER_K: f"k: wanted {either(PAPER_K)} for path 'paper_gvr', got {k}",
        PlanProblem.PAPER_WIDTH: f"width: wanted at most {PAPER_MAX_WIDTH} for path 'paper_gvr', got {width}",
        PlanProblem.PAPER_ARCH: "path: wanted any but 'paper_gvr' on compute capability 12, got 'paper_gvr'",
        PlanProblem.MAX_CTAS: f"max_ctas: wanted 0, 1, 2, 4, 8 or 16, got {max_ctas}",
        PlanProblem.CTAS_ABOVE_MAX: f"ctas_per_row: wanted at most max_ctas = {max_ctas}, got {ctas_per_row}",
    }
    if status != PlanProblem.NONE:
        raise ValueError(problems[PlanProblem(status)])
    path_number, family, *sizes = planned
    return Plan(Path(path_number).name.lower(), Family(family).name.lower(), *sizes)
