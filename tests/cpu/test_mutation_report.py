"""The committed mutation report is whole, its mutators change what they say, changed lines are found."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import run

FOLDER = Path(run.__file__).parent


REPORT = json.loads((FOLDER / "report.json").read_text())
LEAST_SCORE = 0.9
TESTS_ARE_OWED = {
    "eval/common/verdicts.py": 0.8,
    "gvr_topk/contract.py": 0.5,
    "gvr_topk/evaluation/paper_reference.py": 0.6,
    "gvr_topk/layers.py": 0.7,
    "gvr_topk/policy.py": 0.5,
}
"""Modules of a lower score, and that score, which may only rise; the report lists what nobody notices."""


NOT_SAMPLED = {"gvr_topk/evaluation/replay.py"}
"""Modules whose changed lines alone are mutated: ten faults take minutes."""


def test_report_covers_the_modules() -> None:
    rows = REPORT["modules"]
    assert sorted(row["module"] for row in rows) == sorted(set(run.TARGETS) - NOT_SAMPLED)
    assert REPORT["run"] == sum(row["run"] for row in rows) >= 100
    assert REPORT["killed"] == sum(row["killed"] for row in rows)
    assert all(row["killed"] == row["run"] - len(row["survivors"]) for row in rows)
    assert REPORT["score"] == round(REPORT["killed"] / REPORT["run"], 4)


@pytest.mark.parametrize("row", REPORT["modules"], ids=lambda row: row["module"])
def test_score_of_a_module(row: dict[str, Any]) -> None:
    if row.get("source") != run.hash_of(row["module"]):
        pytest.skip("the module has changed since: its score says nothing about it as it is now")
    assert row["killed"] >= TESTS_ARE_OWED.get(row["module"], LEAST_SCORE) * row["run"], row["survivors"]


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


def test_rows_that_are_kept_say_whether_their_module_has_changed(repository: Repository) -> None:
    repository.commit(NEW, STRONG)
    same, changed = "eval/common/pairs.py", "eval/common/plan.py"
    for module in (same, changed):
        repository.write(module, "x = 1\n")
    source = hashlib.sha256(b"x = 1\n").hexdigest()[:16]
    kept = {"run": 10, "killed": 9, "mutants": 11, "survivors": [{"line": 1, "change": "1 to 2"}]}
    rows = [
        {"module": same, "source": source, "older": True, **kept},
        {"module": changed, "source": source[::-1], **kept},
    ]
    repository.write("report.json", json.dumps({"modules": rows}))
    status, output = repository.check("--sample", "0", "--only", MODULE, "--out", "report.json")
    assert status == 0 and f"{changed}: its row is older than the module" in output
    report = json.loads((repository.folder / "report.json").read_text())
    ours, *others = report["modules"]
    assert ours["module"] == MODULE and "older" not in ours
    assert ours["source"] == hashlib.sha256(NEW.encode()).hexdigest()[:16]
    assert [(row["module"], row["older"]) for row in others] == [(same, False), (changed, True)]
    assert others[1] == {**rows[1], "older": True}
    assert (report["run"], report["killed"]) == (20 + ours["run"], 18 + ours["killed"])


def test_changes_start_at_the_merge_base(repository: Repository) -> None:
    """What another branch has done since is no change of this one."""
    repository.git("checkout", "--quiet", "-b", "other")
    repository.commit(OLD.replace("3", "4"), WEAK)
    repository.git("checkout", "--quiet", "-")
    status, output = repository.check("--changed-since", "other")
    assert (status, output) == (0, "mutation: no line with a mutant was changed since other\n")


def test_a_spent_budget_says_what_is_left(repository: Repository) -> None:
    for test, killed in ((WEAK, 0), (STRONG, 1)):
        repository.write(MODULE, NEW)  # not committed, and yet a change
        repository.write(TEST, test)
        status, output = repository.check("--changed-since", "HEAD", "--seconds", "0")
        # One mutant is tried however small the budget is: a check that checks nothing must not pass.
        assert re.search(
            rf"^mutation: {killed} of 1 mutants of the lines changed since HEAD killed, "
            r"1 left after \d+ s of 0 s$",
            output,
            re.MULTILINE,
        )
        assert (status, "survives" in output) == ((0, False) if killed else (1, True))


@pytest.mark.parametrize(
    "arguments", [("--changed-since", "nowhere"), ("--changed-since", "HEAD", "--out", "x")]
)
def test_wrong_use(repository: Repository, arguments: tuple[str, ...]) -> None:
    status, output = repository.check(*arguments)
    assert status == 2 and ("nowhere" in output or "--out" in output)
