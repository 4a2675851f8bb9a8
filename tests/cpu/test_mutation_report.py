"""The committed mutation report is whole, its mutators change what they say, changed lines are found."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    changed = sorted(ast.unparse(tree).splitlines()[1].strip() for _, _, _, tree in run.mutants(source))
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
    assert run.mutants("x = 1  # pragma: no mutate: any number does\n") == []


def test_lines_of_a_mutant_end_before_the_body() -> None:
    source = "if (\n    a\n    < b\n):\n    c = d\n"
    assert [(mutant.line, mutant.last_line) for mutant in run.mutants(source)] == [(1, 3), (2, 3)]


def test_lines_of_a_diff() -> None:
    diff = (
        "--- a.py\n+++ a.py\n@@ -1 +1 @@ def f():\n-x\n+y\n@@ -4,2 +4,0 @@\n-x\n-y\n@@ -9,0 +8,3 @@\n"
        "--- b.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n"
    )
    assert run.parse_diff(diff) == {"a.py": {1, 8, 9, 10}, "/dev/null": set()}


MODULE, TEST = "eval/common/order.py", "tests/cpu/test_eval_sequential.py"
OLD = "def least(x):\n    return x < 3\n"
NEW = OLD + "\n\ndef most(x):\n    return x > 5\n"
WEAK = "from eval.common.order import most\n\n\ndef test_most():\n    assert most(8) and not most(1)\n"
STRONG = WEAK + "    assert most(6) and not most(5)\n"


class Repository:
    """A repository with one module, one test and the program; large packages are stubs, quick to import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("eval/__init__.py", "eval/common/__init__.py"):
            self.write(name, "")
        self.write("torch.py", "def set_num_threads(count):\n    pass\n")
        for name in ("scipy/__init__.py", "scipy/stats.py"):
            self.write(name, "")
        self.write("tests/mutation/run.py", "")
        shutil.copy(run.__file__, folder / "tests" / "mutation" / "run.py")
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *names, *arguments], cwd=self.folder, check=True)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, module: str, test: str) -> None:
        self.write(MODULE, module)
        self.write(TEST, test)
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "--message", "x")

    def check(self, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-B", "tests/mutation/run.py", *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    made.commit(OLD, WEAK)
    return made


def test_changed_lines_alone_are_mutated(repository: Repository) -> None:
    repository.commit(NEW, WEAK)
    status, output = repository.check("--changed-since", "HEAD~1")
    assert status == 1
    assert set(output.splitlines()) == {
        f"{MODULE}:6: survives: Gt to GtE",
        f"{MODULE}:6: survives: 5 to 6",
        "mutation: 0 of 2 mutants of the lines changed since HEAD~1 killed",
    }
    repository.write(TEST, STRONG)
    status, output = repository.check("--changed-since", "HEAD~1")
    assert (status, output) == (0, "mutation: 2 of 2 mutants of the lines changed since HEAD~1 killed\n")


def test_report_names_its_commit(repository: Repository) -> None:
    repository.commit(NEW, STRONG)
    status, output = repository.check("--sample", "1", "--only", MODULE, "--out", "report.json")
    assert status == 0, output
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository.folder, capture_output=True, text=True, check=True
    )
    report = json.loads((repository.folder / "report.json").read_text())
    named, _, state = report["commit"].partition("-")
    assert done.stdout.startswith(named) and len(named) >= 7 and state in ("", "dirty")


def test_changes_start_at_the_merge_base(repository: Repository) -> None:
    """What another branch has done since is no change of this one."""
    repository.git("checkout", "--quiet", "-b", "other")
    repository.commit(OLD.replace("3", "4"), WEAK)
    repository.git("checkout", "--quiet", "-")
    status, output = repository.check("--changed-since", "other")
    assert (status, output) == (0, "mutation: no line with a mutant was changed since other\n")


def test_a_spent_budget_says_what_is_left(repository: Repository) -> None:
    repository.write(MODULE, NEW)  # not committed, and yet a change
    status, output = repository.check("--changed-since", "HEAD", "--seconds", "0")
    # One mutant is tried however small the budget is: a check that checks nothing must not pass.
    assert re.search(
        r"^mutation: [01] of 1 mutants of the lines changed since HEAD killed, 1 left after \d+ s of 0 s$",
        output,
        re.MULTILINE,
    )
    assert status == int("survives" in output)


@pytest.mark.parametrize(
    "arguments", [("--changed-since", "nowhere"), ("--changed-since", "HEAD", "--out", "x")]
)
def test_wrong_use(repository: Repository, arguments: tuple[str, ...]) -> None:
    status, output = repository.check(*arguments)
    assert status == 2 and ("nowhere" in output or "--out" in output)
