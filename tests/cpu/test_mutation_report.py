"""The committed mutation report is whole, and its mutators change what they say."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.mutation import run

FOLDER = Path(run.__file__).parent


def test_report_covers_the_modules_and_keeps_the_score() -> None:
    report = json.loads((FOLDER / "report.json").read_text())
    rows = report["modules"]
    assert sorted(row["module"] for row in rows) == sorted(run.TARGETS)
    assert report["run"] == sum(row["run"] for row in rows) >= 100
    assert report["killed"] == sum(row["run"] - len(row["survivors"]) for row in rows)
    assert report["killed"] / report["run"] >= 0.9


def test_mutants_of_a_line() -> None:
    source = "def f(a: int = 1) -> int:\n    return a + 2 if a < 3 else 0\n"
    changed = sorted(ast.unparse(tree).splitlines()[1].strip() for _, _, tree in run.mutants(source))
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
    assert run.mutants("raise ValueError(f'{1 + 2}')\n") == []
