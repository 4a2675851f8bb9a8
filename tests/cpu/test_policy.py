"""The gate's whole condition table, the plan, both through the compiled policy, and the shared constants."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gvr_topk import constants
from gvr_topk.constants import (
    MAX_CLUSTER_SIZE,
    MAX_ROWS,
    MAX_WIDTH,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_MAX_ZSCORE,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    Family,
    HintReason,
)
from gvr_topk.constants import Path as OpPath
from gvr_topk.contract import DTYPES
from gvr_topk.library import policy_library
from gvr_topk.policy import asks_for_hint, can_use_heuristic, has_code, parse_path, plan

PATHS = [path.name.lower() for path in OpPath]
CLUSTER_SIZES = (1, 2, 4, 8, 16)
SIZES = "0, 1, 2, 4, 8 or 16"
WRONG_CAPS = (-1, 3, 5, 17, 32, -(2**31), 2**32 + 8, -(2**32))
LONG = 70_690
ROW = {"length": LONG, "k": 2048, "slot": 3, "slots": 8, "min_length": 4096, "max_length": 1 << 17}

# Of several reasons the gate names the first of these. Each has a change of `ROW` that gives it.
PRECEDENCE: list[tuple[HintReason, dict[str, Any]]] = [
    (HintReason.DISABLED, {"enabled": False}),
    (HintReason.NO_STATE, {"has_state": False}),
    (HintReason.SHORT_ROW, {"k": LONG}),
    (HintReason.NO_SLOT, {"slot": -1}),
    (HintReason.TOO_SHORT, {"min_length": LONG + 1}),
    (HintReason.TOO_LONG, {"max_length": LONG - 1}),
    (HintReason.FIRST_STEP, {"known": False}),
]
TABLE: list[tuple[HintReason, dict[str, Any]]] = [
    *PRECEDENCE,
    (HintReason.USED, {}),
    (HintReason.USED, {"k": 1}),
    (HintReason.USED, {"k": LONG - 1}),
    *((HintReason.USED, {"slot": slot}) for slot in (0, 7)),
    (HintReason.USED, {"min_length": LONG, "max_length": LONG}),
    (HintReason.USED, {"min_length": -1, "max_length": 2**62}),
    (HintReason.SHORT_ROW, {"k": MAX_WIDTH}),
    *((HintReason.SHORT_ROW, {"length": length}) for length in (2048, 0, -(2**31))),
    *((HintReason.NO_SLOT, {"slot": slot}) for slot in (-(2**31), 8, 2**31 - 1)),
    (HintReason.NO_SLOT, {"slot": 0, "slots": 0}),
    (HintReason.TOO_SHORT, {"length": 4095}),
    (HintReason.TOO_LONG, {"length": (1 << 17) + 1}),
]


@pytest.mark.parametrize(("reason", "change"), TABLE)
def test_condition(reason: HintReason, change: dict[str, Any]) -> None:
    decision = can_use_heuristic(**{**ROW, **change})
    assert decision.reason == reason.name.lower()
    assert decision.allowed == (reason is HintReason.USED)
    assert decision.code is reason


def test_every_reason_has_a_change() -> None:
    assert {reason for reason, _ in PRECEDENCE} == set(HintReason) - {HintReason.USED}


def test_every_combination_of_reasons_names_the_first() -> None:
    for broken in product((False, True), repeat=len(PRECEDENCE)):
        chosen = [entry for entry, is_broken in zip(PRECEDENCE, broken, strict=True) if is_broken]
        arguments = dict(ROW)
        for _, change in chosen:
            arguments |= change
        expected = chosen[0][0] if chosen else HintReason.USED
        assert can_use_heuristic(**arguments).code is expected, arguments


@pytest.mark.parametrize("length", [2, 4095, LONG, MAX_WIDTH])
def test_defaults_allow_every_row_that_is_selected_from(length: int) -> None:
    """An op's launch has no limits of lengths, so any row above k that knows something uses it."""
    assert can_use_heuristic(length=length, k=1).code is HintReason.USED
    assert can_use_heuristic(length=1, k=1).code is HintReason.SHORT_ROW
    assert can_use_heuristic(length=length, k=1, slot=1).code is HintReason.NO_SLOT  # there is one slot


@pytest.mark.parametrize("path", OpPath)
def test_forced_paths(path: OpPath) -> None:
    """Two paths go by the gate; the others ask for no hint, whatever else holds."""
    assert asks_for_hint(path) == (path in (OpPath.AUTO, OpPath.PAPER_GVR))
    decision = can_use_heuristic(**ROW, enabled=asks_for_hint(path))
    assert decision.reason == ("used" if asks_for_hint(path) else "disabled")
    refused = can_use_heuristic(**{**ROW, "slot": -1}, enabled=asks_for_hint(path))
    assert refused.reason == ("no_slot" if asks_for_hint(path) else "disabled")


NUMBERS = ("slot", "slots", "length", "min_length", "max_length")
FLAGS = ("enabled", "has_state", "known")
LIMITS = f"{-(2**63)} to {2**63 - 1}"
GATE: list[tuple[str, Any, str]] = [
    *((name, 2**64 + 70690, f"{LIMITS}, got {2**64 + 70690}") for name in NUMBERS),
    *((name, 5000.0, "an integer, got 5000.0") for name in NUMBERS),
    *((name, True, "an integer, got True") for name in NUMBERS),
    *((name, None, "true or false, got None") for name in FLAGS),
    *((name, 1, "true or false, got 1") for name in FLAGS),
    ("k", 0, f"1 to {MAX_WIDTH}, got 0"),
    ("k", 2**32 + 2048, f"1 to {MAX_WIDTH}, got {2**32 + 2048}"),
]


@pytest.mark.parametrize(("name", "value", "message"), GATE)
def test_the_gate_names_what_it_cannot_compare(name: str, value: Any, message: str) -> None:
    given: dict[str, Any] = {"length": 70690, "k": 2048}
    with pytest.raises(ValueError, match=f"^{name}: wanted {message}$"):
        can_use_heuristic(**given | {name: value})


def test_the_plan_names_what_is_no_flag() -> None:
    with pytest.raises(ValueError, match=r"^aligned: wanted true or false, got 1$"):
        plan(rows=1, width=5000, k=7, aligned=1)  # type: ignore[arg-type]


def test_the_gate_takes_numbers_and_flags_of_numpy() -> None:
    assert can_use_heuristic(length=np.int64(70690), k=np.int32(2048), known=np.True_).allowed  # type: ignore
    assert not can_use_heuristic(length=70690, k=2048, enabled=np.False_).allowed  # type: ignore


# ---------------------------------------------------------------- constants


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "packaging")
    return importlib.import_module("generate_constants")


def check(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of ``generate_constants.py --check``."""
    monkeypatch.setattr("sys.argv", ["generate_constants.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        generator.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_constants_are_those_of_the_headers(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generator.generate() == Path(constants.__file__).read_text(encoding="utf-8")
    assert check(generator, monkeypatch) == 0


def test_a_written_file_is_up_to_date(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "constants.py"
    target.write_text("", encoding="utf-8")
    monkeypatch.setattr(generator, "TARGET", target)
    assert check(generator, monkeypatch) == 1
    monkeypatch.setattr("sys.argv", ["generate_constants.py"])
    generator.main()
    assert check(generator, monkeypatch) == 0


def test_constants_fit_each_other() -> None:
    assert constants.MIN_ARCH == 90  # the oldest architecture there is code for
    assert max(CLUSTER_SIZES) == MAX_CLUSTER_SIZE
    assert MAX_ROWS * MAX_CLUSTER_SIZE <= 2**31 - 1  # blocks of one launch
    zscores = (STATE_ZSCORE_ORIGIN - STATE_MAX_ZSCORE, STATE_ZSCORE_ORIGIN + STATE_MAX_ZSCORE)
    kinds = (STATE_UNKNOWN, 0.0, 1.0, *zscores, STATE_VALUE_ONLY, STATE_INFINITE, STATE_MASKED)
    assert list(kinds) == sorted(set(kinds))  # the first number of a slot tells them apart


# ---------------------------------------------------------------- plan


@pytest.mark.parametrize("name", ["fast", "", "AUTO", "gvr", "radix", "cluster", "cpu", None, 3, []])
def test_unknown_path(name: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^path: wanted one of 'auto', 'paper_gvr', 'no_hint', 'radix_rounds', got"
    ):
        parse_path(name)


@pytest.mark.parametrize("path", PATHS)
def test_plan_takes_the_forced_path(path: str) -> None:
    planned = plan(rows=1, width=LONG, k=2048, path=path)
    assert planned.path == path and planned.family in {family.name.lower() for family in Family}
    assert planned.ctas_per_row >= 1 and planned.threads % 32 == 0


@pytest.mark.parametrize(
    ("arch", "held"),
    [
        *((arch, True) for arch in (90, 100, 103, 120, 121)),
        *((arch, False) for arch in (1, 80, 86, 89, 91, 101, 110, 130, 900)),
    ],
)
def test_there_is_code_for_three_families_of_gpus(arch: int, held: bool) -> None:
    assert has_code(arch, all_builds=True) is held
    assert has_code(arch) <= held


@pytest.mark.parametrize(
    ("archs", "held"),
    [
        ("", set()),
        ("90a-real", {90}),
        ("103a", {103}),
        ("120-real;90a-real", {90, 120, 121}),
        ("90a 100f 120f", {90, 100, 103, 120, 121}),
    ],
)
def test_a_list_of_architectures_may_have_any_notation_of_cmake(archs: str, held: set[int]) -> None:
    code = policy_library().gvr_topk_has_code
    tried = (0, 9, 80, 89, 90, 91, 100, 101, 103, 110, 120, 121, 130)
    assert {arch for arch in tried if code(arch, archs.encode())} == held


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_has_a_plan_that_could_be_forced(arch: int, dtype: torch.dtype) -> None:
    for rows, width in product((1, 7, 64, 500), (1, 4096, LONG, 262_144, MAX_WIDTH)):
        shape: dict[str, Any] = {"rows": rows, "width": width, "k": 2048, "dtype": dtype, "arch": arch}
        planned = plan(**shape, path="auto")
        assert planned.ctas_per_row in (1, 2, 4, 8, 16)
        assert asdict(plan(**shape, path="auto", ctas_per_row=planned.ctas_per_row)) == asdict(planned)


@pytest.mark.parametrize(
    ("asked", "family", "values"),
    [
        ({"width": 512 * 8}, "small_row", 8),
        ({"width": 512 * 8 + 1}, "small_row", 16),
        ({"width": 512 * 16 + 1}, "small_row", 32),
        ({"width": 512 * 32}, "small_row", 32),
        ({"width": 512 * 32 + 1}, "resident", 16),
        ({"width": 512 * 32 + 1, "rows": 16}, "resident", 16),
        ({"width": 512 * 32 + 1, "rows": 17}, "small_row", 64),
        ({"width": 512 * 64, "rows": 128}, "small_row", 64),
        ({"width": 512 * 64 + 1, "rows": 64}, "streaming", 16),
        ({"width": 512 * 64, "rows": 64, "ctas_per_row": 2}, "resident", 32),
        ({"width": 512 * 64, "ctas_per_row": 1}, "small_row", 64),
        ({"width": 4096, "ctas_per_row": 2}, "resident", 16),
        ({"width": 4096, "path": "no_hint", "k": 4000}, "small_row", 8),
        # Rows that are not aligned hold up to 31 elements more, or 63 of 16 bits.
        ({"width": 512 * 16 - 31, "aligned": False}, "small_row", 16),
        ({"width": 512 * 16 - 30, "aligned": False}, "small_row", 32),
        ({"width": 512 * 16 - 63, "aligned": False, "dtype": torch.bfloat16}, "small_row", 16),
        ({"width": 512 * 16 - 62, "aligned": False, "dtype": torch.float16}, "small_row", 32),
        ({"width": 512 * 32 - 30, "aligned": False}, "resident", 16),
        ({"width": 16 * 512 * 32 - 30, "aligned": False}, "streaming", 16),
        # Consumer Blackwell has room for the selected positions of most short rows, and not of the longest.
        ({"width": 512 * 64, "k": 31_744, "ctas_per_row": 1, "arch": 120}, "small_row", 64),
        ({"width": 512 * 64, "k": 31_745, "ctas_per_row": 1, "arch": 120}, "fallback", 16),
        ({"width": 512 * 64, "k": MAX_WIDTH, "ctas_per_row": 1, "arch": 120}, "fallback", 16),
        ({"width": 512 * 64, "k": MAX_WIDTH, "ctas_per_row": 1}, "small_row", 64),
        ({"width": 16 * 512 * 16}, "resident", 16),
        ({"width": 16 * 512 * 16 + 1}, "resident", 32),
        ({"width": 16 * 512 * 32}, "resident", 32),
        ({"width": 16 * 512 * 32 + 1}, "streaming", 16),
        ({"width": MAX_WIDTH}, "streaming", 16),
        ({"width": MAX_WIDTH, "k": 16_384}, "streaming", 16),
        ({"width": MAX_WIDTH, "k": 16_385}, "fallback", 16),
        ({"width": MAX_WIDTH, "k": 8193, "ctas_per_row": 4}, "fallback", 16),
        ({"width": 16 * 512 * 16, "k": 5000}, "resident", 16),
        ({"width": 70_000, "arch": 120}, "fallback", 16),
        ({"width": 8 * 512 * 16, "arch": 120}, "resident", 16),
        ({"width": 70_000, "path": "no_hint"}, "resident", 16),
        ({"width": 70_000, "path": "radix_rounds"}, "fallback", 16),
        ({"width": 100, "path": "radix_rounds"}, "fallback", 16),
        ({"width": MAX_WIDTH, "path": "radix_rounds", "arch": 120}, "fallback", 16),
        ({"width": 70_000, "path": "paper_gvr"}, "paper_gvr", 16),
    ],
)
def test_which_kernel_a_plan_launches(asked: dict[str, Any], family: str, values: int) -> None:
    planned = plan(**({"rows": 1, "k": 2048} | asked))
    assert (planned.family, planned.values_per_thread) == (family, values)


@pytest.mark.parametrize(
    ("asked", "ctas"),
    [
        # A forced size is taken, up to the cap.
        *(({"rows": 3, "width": 100_000, "ctas_per_row": size}, size) for size in CLUSTER_SIZES),
        *(({"width": LONG, "ctas_per_row": size, "max_ctas": 8}, size) for size in (4, 8)),
        # The cap holds, and 0 is none.
        *(({"width": 131_072, "max_ctas": cap}, cap or 16) for cap in (0, *CLUSTER_SIZES)),
        # A cap too small for the width gives the smallest size.
        ({"width": 1 << 20, "max_ctas": 1}, 1),
        ({"width": (1 << 20) + 1, "max_ctas": 1}, 2),
        ({"width": MAX_WIDTH, "max_ctas": 1, "arch": 120}, 8),
        ({"width": 1 << 20, "max_ctas": 2, "arch": 120}, 4),
        # Few SMs get small clusters.
        *(({"width": 131_072, "sm_count": sms}, min(16, sms // 2)) for sms in (8, 16, 32, 66, 132)),
        # Rows that are many get no more than must hold them.
        *(({"rows": 128, "width": width}, ctas) for width, ctas in ((1 << 20, 1), (MAX_WIDTH, 2))),
        *(({"rows": 128, "width": 1 << bits, "arch": 120}, ctas) for bits, ctas in ((18, 1), (20, 4))),
    ],
)
def test_how_many_ctas_a_row_gets(asked: dict[str, Any], ctas: int) -> None:
    assert plan(**({"rows": 1, "k": 2048} | asked)).ctas_per_row == ctas


def test_more_rows_never_get_more_ctas_each() -> None:
    sizes = [plan(rows=rows, width=LONG, k=2048, path="auto").ctas_per_row for rows in (1, 8, 32, 128, 512)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rows": -1}, f"^rows: wanted 0 to {MAX_ROWS}, got -1$"),
        ({"rows": MAX_ROWS + 1}, f"^rows: wanted 0 to {MAX_ROWS}, got {MAX_ROWS + 1}$"),
        ({"rows": "1"}, "^rows: wanted an integer, got '1'$"),
        ({"width": -1}, f"^width: wanted 0 to {MAX_WIDTH}, got -1$"),
        ({"width": MAX_WIDTH + 1}, f"^width: wanted 0 to {MAX_WIDTH}, got {MAX_WIDTH + 1}$"),
        *(({"k": k}, f"^k: wanted 1 to {MAX_WIDTH}, got {k}$") for k in (0, MAX_WIDTH + 1)),
        ({"sm_count": 0}, "^sm_count: wanted at least 1, got 0$"),
        ({"sm_count": 2**40}, f"^sm_count: wanted at most {2**31 - 1}, got {2**40}$"),
        ({"arch": 9.0}, "^arch: wanted an integer, got 9.0$"),
        ({"arch": 0}, "^arch: wanted at least 1, got 0$"),
        ({"arch": 2**33}, f"^arch: wanted at most {2**31 - 1}, got {2**33}$"),
        *(
            (
                {"arch": arch},
                rf"^arch: wanted a GPU that .* code for \(.*\), got compute capability {arch / 10}$",
            )
            for arch in (80, 89, 110, 130)
        ),
        ({"ctas_per_row": 0.5}, "^ctas_per_row: wanted an integer, got 0.5$"),
        *(({"max_ctas": cap}, f"^max_ctas: wanted an integer, got {cap!r}$") for cap in ("8", True)),
        ({"dtype": "fp64"}, "^dtype: wanted torch.float32, torch.bfloat16 or torch.float16, got 'fp64'$"),
        ({"dtype": torch.int32}, "^dtype: wanted .*, got torch.int32$"),
        *(
            ({"ctas_per_row": ctas}, rf"^ctas_per_row: wanted {SIZES} and enough for width 9000, got {ctas}$")
            for ctas in (3, -1, 32, 2**32 + 4, -(2**32))
        ),
        ({"ctas_per_row": 16, "arch": 120}, r"^ctas_per_row: wanted .* 9000, got 16$"),
        ({"ctas_per_row": 1, "width": MAX_WIDTH}, rf"^ctas_per_row: wanted .* {MAX_WIDTH}, got 1$"),
        ({"ctas_per_row": 8, "max_ctas": 4}, r"^ctas_per_row: wanted at most max_ctas = 4, got 8$"),
        *(({"max_ctas": cap}, rf"^max_ctas: wanted {SIZES}, got {cap}$") for cap in WRONG_CAPS),
        ({"path": "paper_gvr", "k": 100}, r"^k: wanted 512, 1024 or 2048 for path 'paper_gvr', got 100$"),
        (
            {"path": "paper_gvr", "width": 300_000},
            r"^width: wanted at most 262144 for path 'paper_gvr', got 300000$",
        ),
        (
            {"path": "paper_gvr", "arch": 120},
            r"^path: wanted any but 'paper_gvr' on compute capability 12, got 'paper_gvr'$",
        ),
    ],
)
def test_plans_that_cannot_be_planned_say_why(asked: dict[str, Any], message: str) -> None:
    plan(rows=MAX_ROWS, width=MAX_WIDTH, k=MAX_WIDTH, sm_count=1)
    plan(rows=0, width=0, k=1, sm_count=2**31 - 1)
    with pytest.raises(ValueError, match=message):
        plan(**({"rows": 1, "width": 9000, "k": 2048} | asked))
