"""The committed mutation report is whole and of today's sources, and the program does what it says."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
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


class Repository:
    """A repository with one module, one test and the program; large packages are stubs, quick to import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("gvr_topk/__init__.py", "")
        self.write("torch.py", "def set_num_threads(count):\n    pass\n")
        self.write("tests/mutation/run.py", "")
        for file in Path(run.__file__).parent.glob("*.py"):
            shutil.copy(file, folder / "tests" / "mutation" / file.name)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def check(self, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-B", "tests/mutation/run.py", *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


PRODUCT_MODULE, PRODUCT_TEST = "gvr_topk/state.py", "tests/cpu/test_state.py"
STATE = """LEAST = 3


def choose(x, limit=LEAST):
    return "more" if x > limit else "less"


class Pair:
    def __init__(self, a):
        self.half = (lambda b: b + 1)(a)


WORDS = [(number, choose(number)) for number in (3, 4)]
"""
STATE_TEST = """import pytest

from gvr_topk.state import LEAST, WORDS, Pair, choose


def test_words():
    assert WORDS == [(3, "less"), (4, "more")] and LEAST == 3


@pytest.mark.parametrize("x", [0, 5])
def test_choose(x):
    assert choose(x, 4) == ("more" if x == 5 else "less")


def test_pair():
    assert Pair(4).half == 5
"""


def test_stale_rows_are_made_again(repository: Repository) -> None:
    """Of the module that has changed, or has no row, and of no other; comments are no change."""
    other = "gvr_topk/__init__.py"
    repository.write("gvr_topk/empty.py", '"""Nothing that could be changed."""\n')
    repository.write(PRODUCT_MODULE, STATE)
    repository.write(PRODUCT_TEST, STATE_TEST)
    status, output = repository.check("--stale")
    assert status == 0, output
    path = repository.folder / "tests" / "mutation" / "report.json"
    report = json.loads(path.read_text())
    assert [row["module"] for row in report["modules"]] == [other, "gvr_topk/empty.py", PRODUCT_MODULE]
    row = report["modules"][-1]
    assert (row["digest"], row["survivors"]) == (mutants.digest(STATE), [])
    assert row["run"] == row["killed"] == row["mutants"] == len(mutants.mutants(STATE)) == 7

    repository.write(PRODUCT_MODULE, f'"""What it is."""\n\n{STATE}')
    assert repository.check("--stale") == (0, "0 of 0 killed\n")
    assert json.loads(path.read_text()) == report

    repository.write(PRODUCT_MODULE, STATE.replace("x > limit", "x >= limit + 1"))
    status, output = repository.check("--stale")
    assert status == 0 and output.startswith(f"{PRODUCT_MODULE} has changed since its row was made\n")
    assert other not in output
    assert json.loads(path.read_text())["modules"][:2] == report["modules"][:2]

    # Nobody notices another number of a module whose test is weak.
    repository.write(PRODUCT_TEST, STATE_TEST.replace("WORDS ==", "WORDS or").replace("LEAST ==", "LEAST >="))
    status, output = repository.check("--only", PRODUCT_MODULE)
    survivors = json.loads(path.read_text())["modules"][-1]["survivors"]
    assert {"code": "LEAST = 3", "change": "3 to 4"} in survivors
    assert "gvr_topk/state.py:1: 3 to 4: LEAST = 3" in output


def test_tests_have_to_pass_without_a_mutant(repository: Repository) -> None:
    repository.write(PRODUCT_MODULE, STATE)
    failure = "wanted its tests to pass without a mutant, got a failure: tests/cpu/test_state.py"
    for test, said in (("def test_wrong():\n    assert LEAST == 4", "::test_wrong"), ("import absent", "\n")):
        repository.write(PRODUCT_TEST, f"{STATE_TEST}\n\n{test}\n")
        status, output = repository.check("--only", PRODUCT_MODULE)
        assert status == 1 and failure + said in output and test.splitlines()[-1] in output
