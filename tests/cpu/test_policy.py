"""The gate's whole condition table, and the plan; both through the compiled policy."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
import torch

from gvr_topk import gate
from gvr_topk.contract import CLUSTER_SIZES, DTYPES, MAX_PAGE_SIZE, MAX_ROWS, MAX_WIDTH
from gvr_topk.gate import Path, Reason, can_use_heuristic, plan

PATHS = [path.name.lower() for path in Path]
LONG = 70_690
ROW = {"length": LONG, "k": 2048}

# One condition broken at a time, everything else as in ROW: why, and with what.
TABLE: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.ALLOWED, {}),
    (Reason.ALLOWED, {"k": 512}),
    (Reason.ALLOWED, {"k": 1024}),
    (Reason.ALLOWED, {"prior_count": 2048}),
    (Reason.ALLOWED, {"arch": 100}),
    (Reason.ALLOWED, {"arch": 120}),
    (Reason.FORCED_ON, {"path": "gvr"}),
    (Reason.FORCED_ON, {"path": "cluster"}),
    (Reason.FORCED_OFF, {"path": "radix"}),
    (Reason.DISABLED, {"enabled": False}),
    (Reason.NO_PRIOR, {"has_prior": False}),
    (Reason.PRIOR_SHAPE, {"prior_count": 2047}),
    (Reason.PRIOR_SHAPE, {"prior_count": 4096}),
    (Reason.LAYOUT, {"inner_stride": 2}),
    (Reason.LAYOUT, {"inner_stride": 0}),
    (Reason.UNSUPPORTED_K, {"k": 2047}),
    (Reason.UNSUPPORTED_K, {"k": 4096}),
    (Reason.UNSUPPORTED_K, {"k": 1}),
    (Reason.UNSUPPORTED_ARCH, {"arch": 80}),
    (Reason.UNSUPPORTED_ARCH, {"arch": 89}),
    (Reason.TOO_SHORT, {"length": 2048}),
    (Reason.TOO_SHORT, {"length": 0}),
    (Reason.TOO_SHORT, {"length": -1}),
    (Reason.TOO_LONG, {"length": 2 * MAX_WIDTH}),
]
ALLOWING = (Reason.ALLOWED, Reason.FORCED_ON)
# What makes the kernel incorrect; forcing it on does not waive these.
BARRIERS = {"inner_stride": 2, "k": 2047, "arch": 80}


@pytest.mark.parametrize(("reason", "change"), TABLE)
def test_condition(reason: Reason, change: dict[str, Any]) -> None:
    decision = can_use_heuristic(**{**ROW, **change})
    assert decision.reason == reason.name.lower()
    assert decision.allowed == (reason in ALLOWING)
    assert isinstance(decision.detail, str) and decision.detail


def test_the_table_has_every_reason() -> None:
    assert {reason for reason, _ in TABLE} == set(Reason)


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (lambda: gate.GVR_MIN_LENGTH - 1, Reason.TOO_SHORT),
        (lambda: gate.GVR_MIN_LENGTH, Reason.ALLOWED),
        (lambda: gate.GVR_MAX_LENGTH, Reason.ALLOWED),
        (lambda: gate.GVR_MAX_LENGTH + 1, Reason.TOO_LONG),
    ],
)
def test_length_boundaries(length: Any, reason: Reason) -> None:
    decision = can_use_heuristic(length=length(), k=2048)
    assert decision.reason == reason.name.lower()
    if reason is not Reason.ALLOWED:
        assert str(length()) in decision.detail


def test_architecture_boundary() -> None:
    assert can_use_heuristic(**ROW, arch=gate.MIN_ARCH).allowed
    assert not can_use_heuristic(**ROW, arch=gate.MIN_ARCH - 1).allowed


@pytest.mark.parametrize("path", ["gvr", "cluster"])
@pytest.mark.parametrize("barrier", BARRIERS)
def test_forcing_on_does_not_waive_what_the_kernel_needs(path: str, barrier: str) -> None:
    assert not can_use_heuristic(**{**ROW, barrier: BARRIERS[barrier]}, path=path).allowed


@pytest.mark.parametrize(
    "change",
    [{"enabled": False}, {"has_prior": False}, {"prior_count": 7}, {"length": 5}, {"length": 4 * MAX_WIDTH}],
)
@pytest.mark.parametrize("path", ["gvr", "cluster"])
def test_forcing_on_waives_what_is_only_slow(path: str, change: dict[str, Any]) -> None:
    assert can_use_heuristic(**{**ROW, **change}, path=path).reason == "forced_on"


@pytest.mark.parametrize(("reason", "change"), TABLE)
def test_forcing_off_always_wins(reason: Reason, change: dict[str, Any]) -> None:
    assert can_use_heuristic(**{**ROW, **change, "path": "radix"}).reason == "forced_off"


def test_allowed_means_that_no_condition_is_broken() -> None:
    """Every combination of good and bad values: allowed exactly where all of them are good."""
    choices: dict[str, tuple[Any, Any]] = {
        "enabled": (True, False),
        "has_prior": (True, False),
        "prior_count": (None, 7),
        "inner_stride": (1, 2),
        "k": (2048, 100),
        "length": (LONG, 10),
        "arch": (90, 75),
    }
    for bad in product((0, 1), repeat=len(choices)):
        arguments = {name: choices[name][side] for name, side in zip(choices, bad, strict=True)}
        decision = can_use_heuristic(**arguments)
        assert decision.allowed == (not any(bad)), arguments
        assert decision.reason == "allowed" or any(bad), arguments


def test_details_name_the_value_that_decided() -> None:
    assert "2047" in can_use_heuristic(**ROW, prior_count=2047).detail
    assert "3" in can_use_heuristic(**ROW, inner_stride=3).detail
    assert "777" in can_use_heuristic(length=LONG, k=777).detail
    assert "8.0" in can_use_heuristic(**ROW, arch=80).detail
    assert "radix" in can_use_heuristic(**ROW, path="radix").detail


def test_constants() -> None:
    assert 0 < gate.GVR_MIN_LENGTH < gate.GVR_MAX_LENGTH <= MAX_WIDTH
    assert gate.MIN_ARCH == 90  # the oldest architecture there is code for
    assert (gate.MAX_WIDTH, gate.MAX_ROWS, gate.MAX_PAGE_SIZE) == (MAX_WIDTH, MAX_ROWS, MAX_PAGE_SIZE)
    assert MAX_ROWS * max(CLUSTER_SIZES) <= 2**31 - 1  # blocks of one launch
    with pytest.raises(AttributeError, match="NO_SUCH"):
        gate.NO_SUCH  # noqa: B018


@pytest.mark.parametrize("name", ["fast", "", "GVR ", "cpu", None, 3])
def test_unknown_path(name: Any) -> None:
    with pytest.raises(ValueError, match=r"path: want one of .*'auto'.*'gvr'.*'radix'.*'cluster', got"):
        Path.parse(name)


@pytest.mark.parametrize("path", PATHS)
def test_plan_takes_the_forced_path(path: str) -> None:
    made = plan(rows=1, width=LONG, k=2048, path=path)
    assert made.path == (path if path != "auto" else made.path) and made.path != "auto"
    assert made.ctas_per_row >= 1 and made.threads % 32 == 0


@pytest.mark.parametrize("ctas", [1, 2, 4, 8, 16])
def test_plan_takes_the_forced_cluster_size(ctas: int) -> None:
    assert plan(rows=3, width=100_000, k=2048, path="cluster", ctas_per_row=ctas).ctas_per_row == ctas


@pytest.mark.parametrize(
    ("ctas", "width", "arch"),
    [(3, 1000, 90), (-1, 1000, 90), (32, 1000, 90), (16, 1000, 120), (1, MAX_WIDTH, 90)],
)
def test_plan_refuses_a_cluster_that_cannot_serve(ctas: int, width: int, arch: int) -> None:
    with pytest.raises(ValueError, match=rf"ctas_per_row: want .* {width}, got {ctas}$"):
        plan(rows=1, width=width, k=512, ctas_per_row=ctas, arch=arch)


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_has_a_plan_that_could_be_forced(arch: int, dtype: torch.dtype) -> None:
    for rows, width in product((1, 7, 64, 500), (1, 4096, LONG, 262_144, MAX_WIDTH)):
        shape: dict[str, Any] = {"rows": rows, "width": width, "k": 2048, "dtype": dtype, "arch": arch}
        made = plan(**shape, path="cluster")
        assert made.ctas_per_row in (1, 2, 4, 8, 16)
        assert asdict(plan(**shape, path="cluster", ctas_per_row=made.ctas_per_row)) == asdict(made)


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("cap", CLUSTER_SIZES)
def test_the_cap_holds_wherever_the_row_fits(cap: int, arch: int) -> None:
    per_cta = 1 << 18 if arch == 120 else 1 << 20
    for rows, width in product((1, 3, 16, 64, 500), (1, 4096, 32_768, LONG, 262_144, MAX_WIDTH)):
        free = plan(rows=rows, width=width, k=2048, arch=arch)
        made = plan(rows=rows, width=width, k=2048, arch=arch, max_ctas=cap)
        needed = next(size for size in CLUSTER_SIZES if size * per_cta >= width)
        assert made.ctas_per_row <= max(cap, needed) and made.ctas_per_row >= needed
        if free.ctas_per_row <= cap:
            assert made == free


@pytest.mark.parametrize(
    ("cap", "width", "arch", "ctas"),
    [(1, 1 << 20, 90, 1), (1, (1 << 20) + 1, 90, 2), (1, MAX_WIDTH, 120, 8), (2, 1 << 20, 120, 4)],
)
def test_a_cap_too_small_for_the_width_gives_the_smallest_size(
    cap: int, width: int, arch: int, ctas: int
) -> None:
    assert plan(rows=1, width=width, k=2048, arch=arch, max_ctas=cap).ctas_per_row == ctas


def test_the_cap_in_use() -> None:
    sizes = [plan(rows=1, width=131_072, k=2048, max_ctas=cap).ctas_per_row for cap in (0, *CLUSTER_SIZES)]
    assert sizes == [16, *CLUSTER_SIZES]


@pytest.mark.parametrize("cap", [-1, 3, 5, 32, -(2**31)])
def test_a_cap_that_is_no_cluster_size(cap: int) -> None:
    with pytest.raises(ValueError, match=rf"^max_ctas: want 0, 1, 2, 4, 8 or 16, got {cap}$"):
        plan(rows=1, width=LONG, k=2048, max_ctas=cap)


def test_a_forced_size_must_not_exceed_the_cap() -> None:
    assert plan(rows=1, width=LONG, k=2048, ctas_per_row=4, max_ctas=8).ctas_per_row == 4
    assert plan(rows=1, width=LONG, k=2048, ctas_per_row=8, max_ctas=8).ctas_per_row == 8
    with pytest.raises(ValueError, match=r"^ctas_per_row: want at most max_ctas = 4, got 8$"):
        plan(rows=1, width=LONG, k=2048, ctas_per_row=8, max_ctas=4)


@pytest.mark.parametrize(("sm_count", "ctas"), [(8, 4), (16, 8), (32, 16), (66, 16), (132, 16)])
def test_few_sms_get_small_clusters(sm_count: int, ctas: int) -> None:
    assert plan(rows=1, width=131_072, k=2048, sm_count=sm_count).ctas_per_row == ctas


@pytest.mark.parametrize(("k", "width"), [(MAX_WIDTH, 5000), (2048, LONG), (7, 7), (MAX_WIDTH, MAX_WIDTH)])
def test_a_row_stages_no_more_than_it_has(k: int, width: int) -> None:
    assert plan(rows=1, width=width, k=k).staged == min(k, width)


@pytest.mark.parametrize(
    ("asked", "family", "values"),
    [
        ({"width": 512 * 8}, "single", 8),
        ({"width": 512 * 8 + 1}, "single", 16),
        ({"width": 512 * 16 + 1}, "single", 32),
        ({"width": 512 * 32}, "single", 32),
        ({"width": 512 * 32 + 1}, "resident", 16),
        ({"width": 512 * 32 + 1, "rows": 16}, "resident", 16),
        ({"width": 512 * 32 + 1, "rows": 17}, "single", 64),
        ({"width": 512 * 64, "rows": 128}, "single", 64),
        ({"width": 512 * 64 + 1, "rows": 64}, "stream", 16),
        ({"width": 512 * 64, "rows": 64, "ctas_per_row": 2}, "resident", 32),
        ({"width": 512 * 64, "ctas_per_row": 1}, "single", 64),
        ({"width": 4096, "ctas_per_row": 2}, "resident", 16),
        ({"width": 4096, "path": "radix", "k": 4000}, "single", 8),
        ({"width": 16 * 512 * 16}, "resident", 16),
        ({"width": 16 * 512 * 16 + 1}, "resident", 32),
        ({"width": 16 * 512 * 32}, "resident", 32),
        ({"width": 16 * 512 * 32 + 1}, "stream", 16),
        ({"width": MAX_WIDTH}, "stream", 16),
        ({"width": MAX_WIDTH, "k": 2049}, "general", 16),
        ({"width": 16 * 512 * 16, "k": 5000}, "resident", 16),
        ({"width": 70_000, "arch": 120}, "general", 16),
        ({"width": 8 * 512 * 16, "arch": 120}, "resident", 16),
        ({"width": 70_000, "path": "radix"}, "resident", 16),
        ({"width": 70_000, "path": "gvr"}, "four_phase", 16),
    ],
)
def test_which_kernel_a_plan_launches(asked: dict[str, Any], family: str, values: int) -> None:
    made = plan(**({"rows": 1, "k": 2048} | asked))
    assert (made.family, made.values_per_thread) == (family, values)


@pytest.mark.parametrize(
    ("rows", "width", "arch", "ctas"),
    [(128, 1 << 20, 90, 1), (128, MAX_WIDTH, 90, 2), (128, 1 << 18, 120, 1), (128, 1 << 20, 120, 4)],
)
def test_a_row_gets_no_more_ctas_than_must_hold_it(rows: int, width: int, arch: int, ctas: int) -> None:
    assert plan(rows=rows, width=width, k=2048, arch=arch, path="cluster").ctas_per_row == ctas


def test_more_rows_never_get_more_ctas_each() -> None:
    sizes = [
        plan(rows=rows, width=LONG, k=2048, path="cluster").ctas_per_row for rows in (1, 8, 32, 128, 512)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ctas_per_row": 3}, r"^ctas_per_row: want 0, 1, 2, 4, 8 or 16 and enough for width 9000, got 3$"),
        ({"ctas_per_row": 16, "arch": 120}, r"^ctas_per_row: want .* got 16$"),
        ({"path": "gvr", "k": 100}, r"^k: want 512, 1024 or 2048 for path 'gvr', got 100$"),
        ({"path": "gvr", "width": 300_000}, r"^width: want at most 262144 for path 'gvr', got 300000$"),
        (
            {"path": "gvr", "arch": 120},
            r"^path: want 'cluster' or 'radix' on compute capability 12, got 'gvr'$",
        ),
    ],
)
def test_plans_that_cannot_be_made_say_why(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate.plan(**({"rows": 1, "width": 9000, "k": 2048} | asked))
