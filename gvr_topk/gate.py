"""The gate and the plan of ``cpp/include/gvr_topk/policy.h``, as Python values.

There is one definition of both, in C++; this module only names its arguments and results.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

import torch

from gvr_topk.contract import DTYPES
from gvr_topk.library import policy_library


class Path(enum.IntEnum):
    """Which kernel serves a call. ``AUTO`` lets the plan decide."""

    AUTO = 0
    GVR = 1
    RADIX = 2
    CLUSTER = 3

    @classmethod
    def parse(cls, name: str) -> Path:
        """Path of a name in lower case.

        Raises
        ------
        ValueError
            The name is none of ``auto``, ``gvr``, ``radix``, ``cluster``.
        """
        try:
            return cls[name.upper()]
        except (KeyError, AttributeError):
            wanted = ", ".join(repr(p.name.lower()) for p in cls)
            raise ValueError(f"path: want one of {wanted}, got {name!r}") from None


class Reason(enum.IntEnum):
    """Why the gate decided as it did; the order is `GateReason`'s in ``policy.h``."""

    ALLOWED = 0
    FORCED_ON = 1
    FORCED_OFF = 2
    DISABLED = 3
    NO_PRIOR = 4
    PRIOR_SHAPE = 5
    LAYOUT = 6
    UNSUPPORTED_K = 7
    TOO_SHORT = 8
    TOO_LONG = 9
    UNSUPPORTED_ARCH = 10


class Family(enum.IntEnum):
    """Kernels a plan can launch; the values are policy.h's."""

    FOUR_PHASE = 0
    RESIDENT = 1
    STREAM = 2
    GENERAL = 3
    SINGLE = 4


@dataclass(frozen=True)
class GateDecision:
    """Outcome of `can_use_heuristic`."""

    allowed: bool
    reason: str
    """Lower-case name of the `Reason`, fit for a counter's label."""
    detail: str
    """One sentence with the value that decided and the threshold it met."""


@dataclass(frozen=True)
class Plan:
    """How a call is launched; printable, and the same value the kernels are launched with."""

    path: str
    family: str
    """Kernel: ``resident`` (the row in registers), ``stream``, ``general``, ``single`` (one CTA, a short
    row), or the paper's ``four_phase``."""
    ctas_per_row: int
    threads: int
    values_per_thread: int
    list_capacity: int
    """Keys inside the guessed bracket that one row's CTAs can list, each in its share."""
    candidate_capacity: int
    masks: int
    ring_depth: int
    """Words per thread under way in the kernels that walk a long row, but for ``stream``, whose ring is its
    own."""
    staged: int
    """Results of one row that can be staged in shared memory: the lesser of ``k`` and the width."""


GVR_MIN_LENGTH: int
"""Shortest row whose hint is used, in elements (paper, Table 6); shorter ones are sampled."""
GVR_MAX_LENGTH: int
"""Longest row whose hint is used, in elements."""
FOUR_PHASE_MAX_WIDTH: int
"""Widest buffer of path ``"gvr"``, in elements."""
MIN_ARCH: int
"""Oldest compute capability served, times ten."""

MAX_WIDTH: int
"""Widest buffer, in elements; `gvr_topk.contract` has the same number."""
MAX_ROWS: int
"""Most rows of one call, likewise."""
MAX_PAGE_SIZE: int
"""Largest page of a page table, likewise."""

_CONSTANTS = {
    "GVR_MIN_LENGTH": 0,
    "GVR_MAX_LENGTH": 1,
    "MIN_ARCH": 2,
    "FOUR_PHASE_MAX_WIDTH": 3,
    "MAX_WIDTH": 4,
    "MAX_ROWS": 5,
    "MAX_PAGE_SIZE": 6,
}


def __getattr__(name: str) -> int:
    # Read from the library on first use, so that importing the package needs no compiled file.
    if name in _CONSTANTS:
        return int(policy_library().gvr_topk_constant(_CONSTANTS[name]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def can_use_heuristic(
    *,
    length: int,
    k: int,
    enabled: bool = True,
    has_prior: bool = True,
    prior_count: int | None = None,
    inner_stride: int = 1,
    arch: int = 90,
    path: str = "auto",
) -> GateDecision:
    """Decide whether the hint-driven path may serve a row, and say why.

    The paper's seven conditions (section 5.5): a hint exists, it holds `k` positions, the layout is
    contiguous, `k` is a compiled value, the row is long enough and not too long, and the GPU is
    supported. Ours: the length is the row's own, not the width of the buffer it sits in.

    Parameters
    ----------
    length : int
        True row length, in elements.
    k : int
        Items wanted.
    enabled : bool
        ``enable_heuristic_topk`` of the configuration.
    has_prior : bool
        A previous-step result is at hand.
    prior_count : int, optional
        Positions per hint; default `k`.
    inner_stride : int
        Elements between neighbours of one row.
    arch : int
        Compute capability times ten (90 Hopper, 100 Blackwell).
    path : str
        ``"auto"`` decides; ``"gvr"`` or ``"cluster"`` forces on (what makes the kernel incorrect still
        refuses); ``"radix"`` forces off.

    Returns
    -------
    GateDecision

    Examples
    --------
    >>> can_use_heuristic(length=70690, k=2048).reason
    'allowed'
    >>> can_use_heuristic(length=4096, k=2048).reason
    'too_short'
    """
    reason = Reason(
        policy_library().gvr_topk_can_use_heuristic(
            int(enabled),
            int(has_prior),
            k if prior_count is None else prior_count,
            inner_stride,
            k,
            length,
            arch,
            int(Path.parse(path)),
        )
    )
    details = {
        Reason.ALLOWED: f"length {length} and k {k} are in range and a hint is at hand",
        Reason.FORCED_ON: f"path {path!r} was asked for",
        Reason.FORCED_OFF: f"path {path!r} was asked for",
        Reason.DISABLED: "enable_heuristic_topk is false",
        Reason.NO_PRIOR: "there is no previous-step result for this row",
        Reason.PRIOR_SHAPE: f"the hint holds {prior_count} positions, want k = {k}",
        Reason.LAYOUT: f"inner stride is {inner_stride}, want 1",
        Reason.UNSUPPORTED_K: f"k is {k}, want 512, 1024 or 2048",
        Reason.UNSUPPORTED_ARCH: (
            f"compute capability is {arch / 10:.1f}, want {_constant('MIN_ARCH') / 10:.1f} or later"
        ),
        Reason.TOO_SHORT: f"length is {length}, want at least {_constant('GVR_MIN_LENGTH')}",
        Reason.TOO_LONG: f"length is {length}, want at most {_constant('GVR_MAX_LENGTH')}",
    }
    return GateDecision(
        allowed=reason in (Reason.ALLOWED, Reason.FORCED_ON),
        reason=reason.name.lower(),
        detail=details[reason],
    )


def _constant(name: str) -> int:
    return __getattr__(name)


def plan(
    *,
    rows: int,
    width: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    path: str = "auto",
    sm_count: int = 132,
    arch: int = 90,
    ctas_per_row: int = 0,
    max_ctas: int = 0,
) -> Plan:
    """Say how a call of this shape is launched.

    Parameters
    ----------
    rows, width, k : int
        Shape of the call: score rows, columns of the buffer, items per row.
    dtype : torch.dtype
        Score dtype.
    path : str
        As for `can_use_heuristic`.
    sm_count : int
        Multiprocessors that the stream may use: 132 on a whole H200, fewer in a green context.
    arch : int
        Compute capability times ten.
    ctas_per_row : int
        Force the cluster size (1, 2, 4, 8 or 16); 0 decides.
    max_ctas : int
        Cap the cluster size (1, 2, 4, 8 or 16); 0 sets no cap. A width that needs more than the cap takes
        the smallest size that holds it.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        `ctas_per_row` is not a size the GPU offers, too small for `width` or above `max_ctas`; `max_ctas`
        is no cluster size; or path ``"gvr"`` serves neither this `k`, `width` nor `arch`.
    """
    made = (ctypes.c_int32 * 10)()
    status = policy_library().gvr_topk_make_plan(
        rows,
        width,
        k,
        DTYPES.index(dtype),
        int(Path.parse(path)),
        sm_count,
        arch,
        ctas_per_row,
        max_ctas,
        made,
    )
    problems = {
        1: f"ctas_per_row: want 0, 1, 2, 4, 8 or 16 and enough for width {width}, got {ctas_per_row}",
        2: f"k: want 512, 1024 or 2048 for path 'gvr', got {k}",
        3: f"width: want at most {_constant('FOUR_PHASE_MAX_WIDTH')} for path 'gvr', got {width}",
        4: "path: want 'cluster' or 'radix' on compute capability 12, got 'gvr'",
        5: f"max_ctas: want 0, 1, 2, 4, 8 or 16, got {max_ctas}",
        6: f"ctas_per_row: want at most max_ctas = {max_ctas}, got {ctas_per_row}",
    }
    if status != 0:
        raise ValueError(problems[status])
    return Plan(Path(made[0]).name.lower(), Family(made[1]).name.lower(), *made[2:])
