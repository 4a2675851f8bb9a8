"""The committed mutation report is whole and of today's sources, and mutants are what they are said to be."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import mutants, run, targets

ROOT = Path(run.__file__).resolve().parents[2]
REPORT = json.loads(run.REPORT.read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = {row["module"]: row for row in REPORT["modules"]}
PRODUCT = targets.product_modules()

LEAST_SCORE = 0.9
TESTS_ARE_OWED: dict[str, float] = {
    "gvr_topk/cli.py": 0.66,
    "gvr_topk/integrations/_kit/counters.py": 0.83,
    "gvr_topk/integrations/tensorrt_llm/llm_config.py": 0.83,
    "gvr_topk/integrations/tensorrt_llm/plugin.py": 0.83,
    "gvr_topk/layers.py": 0.83,
}
"""Modules of a lower score, and that score, which may only rise; the report lists what nobody notices."""


def test_report_is_whole() -> None:
    rows = REPORT["modules"]
    assert [row["module"] for row in rows] == PRODUCT
    assert (REPORT["format"], REPORT["seed"]) == (run.FORMAT, mutants.SEED)
    assert REPORT["run"] == sum(row["run"] for row in rows)
    assert REPORT["killed"] == sum(row["killed"] for row in rows)
    assert REPORT["score"] == round(REPORT["killed"] / REPORT["run"], 4) >= 0.8
    assert all(row["killed"] == row["run"] - len(row["survivors"]) for row in rows)


@pytest.mark.parametrize("module", PRODUCT)
def test_a_module_has_a_row_of_its_source(module: str) -> None:
    """A stale row fails: its score says nothing about the module as it is now."""
    stale = run.stale_modules(REPORT["modules"])
    again = "run python tests/mutation/run.py --stale, and commit the report"
    assert module not in stale, f"{module} {stale[module]}: {again}"
    every = len(run.mutants_of(module))
    assert (ROWS[module]["mutants"], ROWS[module]["run"]) == (every, min(every, targets.sample_of(module)))


@pytest.mark.parametrize("module", PRODUCT)
def test_score_of_a_module(module: str) -> None:
    row = ROWS[module]
    least = TESTS_ARE_OWED.get(module, LEAST_SCORE)
    assert row["killed"] >= least * row["run"], row["survivors"]


def test_the_modules_that_select_owe_nothing() -> None:
    core = {f"gvr_topk/{name}.py" for name in ("ops", "arguments", "cpu", "contract", "policy")}
    assert set(targets.SAMPLES) == core and core.isdisjoint(TESTS_ARE_OWED)
    assert min(targets.SAMPLES.values()) >= 60
    assert set(TESTS_ARE_OWED) <= set(PRODUCT)


def test_what_is_outside_of_the_product_has_a_reason() -> None:
    parts = targets.OUTSIDE_OF_THE_PRODUCT
    assert all(len(reason.split()) >= 4 for reason in parts.values())
    assert all((ROOT / part).exists() for part in parts if part != "gvr_topk/_build.py")
    assert set(targets.TARGETS) <= set(PRODUCT)
    assert all(targets.tests_of(module) for module in PRODUCT if run.mutants_of(module))


def test_tests_of_the_modules_exist() -> None:
    names = targets.test_files(filter(run.mutants_of, PRODUCT))
    assert [name for name in sorted(names) if not (ROOT / "tests" / "cpu" / name).is_file()] == []


@pytest.mark.parametrize("module", sorted(targets.EQUIVALENT))
def test_equivalent_mutants_are_those_of_the_module(module: str) -> None:
    there = {(mutant.code, mutant.change) for mutant in mutants.mutants(run.source_of(module))}
    assert set(targets.EQUIVALENT[module]) <= there
    assert all(targets.EQUIVALENT[module].values())


# ---------------------------------------------------------------- digests and mutants


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        ('"""Other words."""\n\n\ndef f(a):  # why\n    """What."""\n    return a  <  3\n', True),
        ("def f(a):\n    return a < 3\n", True),
        ("def f(a):\n    'A docstring.'\n\n    return (\n        a < 3\n    )\n", True),
        ("def f(a):\n    return a < 4\n", False),
        ("def f(a):\n    return a <= 3\n", False),
        ("def f(b):\n    return b < 3\n", False),
        ("def f(a):\n    return a < 3  # pragma: no mutate: any number does\n", False),
        ("def f(a):\n    return a < 3\n\n\nx = 'text'\n", False),
    ],
)
def test_digest_is_of_what_a_module_does(text: str, is_same: bool) -> None:
    base = '"""Words."""\n\n\ndef f(a):\n    return a < 3\n'
    assert (mutants.digest(text) == mutants.digest(base)) == is_same


def test_mutants_of_a_line() -> None:
    source = "def f(a: int = 1) -> int:\n    return a + 2 if a < 3 else 0\n"
    changed = sorted(ast.unparse(mutant.tree()).splitlines()[1].strip() for mutant in mutants.mutants(source))
    assert changed == sorted(
        [
            "return a + 2 if not a < 3 else 0",
            "return a + 2 if a < 3 else 0",  # the default, in the line above
            "return a - 2 if a < 3 else 0",
            "return a + 2 if a <= 3 else 0",
            "return a + 3 if a < 3 else 0",
            "return a + 2 if a < 4 else 0",
            "return a + 2 if a < 3 else 1",
        ]
    )
    assert mutants.mutants("raise ValueError(f'{1 + 2}')\n") == []
    assert mutants.mutants("x = 1  # pragma: no mutate: any number does\n") == []
