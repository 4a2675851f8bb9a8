"""Mutation testing: how many small faults, put into a module one at a time, its tests notice.

    python tests/mutation/run.py --out tests/mutation/report.json
    python tests/mutation/run.py --only gvr_topk/prior.py --sample 0

A mutant differs from its module in one place: a comparison moves by one, ``+`` becomes ``-``, an integer
grows by one, a condition is negated, ``and`` becomes ``or``. Each runs in a forked process, so that torch is
imported once, and against the tests in `TARGETS` alone. A mutant is killed when a test fails or runs out of
time. ``--sample`` takes so many mutants of each module, drawn with a fixed seed; 0 takes all. With
``--only`` the other modules keep their rows of a report that lies there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEED = 21
TIMEOUT_S = 120

# What is left out takes seconds a mutant and adds nothing to the tests beside it.
TARGETS: dict[str, tuple[str, ...]] = {
    "eval/common/evidence.py": ("test_eval_evidence.py",),
    "eval/common/order.py": ("test_eval_sequential.py",),
    "eval/common/pairing.py": ("test_eval_sequential.py",),
    "eval/common/pairs.py": ("test_eval_inputs.py",),
    "eval/common/plan.py": ("test_eval_plan.py",),
    "eval/common/sequential.py": ("test_eval_sequential.py",),
    "eval/common/store.py": ("test_eval_store.py",),
    "eval/common/verdicts.py": ("test_eval_sequential.py",),
    "gvr_topk/ops.py": ("test_ops.py", "-k", "not opcheck and not compiled"),
    "gvr_topk/prior.py": ("test_prior.py",),
    "gvr_topk/evaluation/reference.py": ("test_reference.py", "-k", "not shipped and not adversarial"),
    "gvr_topk/evaluation/trace.py": ("test_trace.py",),
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip


def mutate(node: ast.AST) -> Iterator[str]:
    """Change `node` in place, in each way there is, and name the change; undone by the caller's copy."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        old, new = type(node.ops[0]), COMPARISONS[type(node.ops[0])]
        node.ops[0] = new()
        yield f"{old.__name__} to {new.__name__}"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        before, after = type(node.op), ARITHMETIC[type(node.op)]
        node.op = after()
        yield f"{before.__name__} to {after.__name__}"
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or if isinstance(node.op, ast.And) else ast.And
        node.op = swapped()
        yield f"to {swapped.__name__}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
        yield f"to {node.value}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value += 1
        yield f"{node.value - 1} to {node.value}"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        yield "negated condition"


def mutants(source: str) -> list[tuple[int, str, ast.Module]]:
    """Line, change and tree of every mutant; annotations, decorators and messages are left alone."""
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        parts = [getattr(node, field, None) for field in ("annotation", "returns")]
        for part in [*parts, *getattr(node, "decorator_list", ())]:
            if isinstance(part, ast.AST):
                skipped |= {id(inner) for inner in ast.walk(part)}
        if isinstance(node, ast.keyword) and node.arg == "strict":  # a guard of zip that cannot fire
            skipped |= {id(part) for part in ast.walk(node)}
        if isinstance(node, ast.JoinedStr | ast.Raise):  # what a message says is no behaviour
            skipped |= {id(part) for part in ast.walk(node)}
    found = []
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        changed = copy.deepcopy(tree)
        twin = list(ast.walk(changed))[index]
        for change in mutate(twin):
            found.append((getattr(node, "lineno", 0), change, ast.fix_missing_locations(changed)))
    return found


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves one module from a changed tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname == self.name:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)  # type: ignore[arg-type]
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def survives(module: str, tree: ast.Module | None) -> bool:
    """Whether all tests of a module pass with the changed tree in its place."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # what the tests start ends with them
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1), os.dup2(sink, 2)
            if tree is not None:
                sys.meta_path.insert(0, Mutated(module[:-3].replace("/", "."), ROOT / module, tree))
            import pytest

            name, *chosen = TARGETS[module]
            options = [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:timeout",
                "-o",
                "addopts=",
                "-o",
                "timeout=",
            ]
            os._exit(int(pytest.main([*options, *chosen, str(ROOT / "tests" / "cpu" / name)])))
        except BaseException:
            os._exit(99)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not done:
        os.waitpid(pid, 0)
        return False
    return os.waitstatus_to_exitcode(status) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the mutants that the tests notice.")
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="a module; repeatable")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each module; 0 for all")
    parser.add_argument("--out", type=Path, help="where to write the report")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    os.chdir(ROOT)
    os.environ["CI"] = "true"  # hypothesis then draws the same examples in every run
    for name in (
        "torch",
        "numpy",
        "scipy.stats",
        "pytest",
        "hypothesis",
        "hypothesis.extra.numpy",
        "pydantic",
    ):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    rows = []
    for module in options.only or TARGETS:
        if not survives(module, None):
            raise SystemExit(f"{module}: wanted its tests to pass without a mutant, got a failure")
        every = mutants((ROOT / module).read_text(encoding="utf-8"))
        chosen = every
        if 0 < options.sample < len(every):
            chosen = random.Random(SEED).sample(every, options.sample)
        alive = [{"line": line, "change": change} for line, change, tree in chosen if survives(module, tree)]
        killed = len(chosen) - len(alive)
        rows.append(
            {
                "module": module,
                "mutants": len(every),
                "run": len(chosen),
                "killed": killed,
                "survivors": alive,
            }
        )
        print(f"{module}: {killed} of {len(chosen)} killed, survivors {alive}", flush=True)
    if options.out is not None and options.only and options.out.exists():
        kept = json.loads(options.out.read_text(encoding="utf-8"))["modules"]
        rows += [row for row in kept if row["module"] not in options.only]
        rows.sort(key=lambda row: row["module"])
    run, killed = sum(row["run"] for row in rows), sum(row["killed"] for row in rows)
    report = {
        "format": "gvr_topk.mutation/1",
        "seed": SEED,
        "sample": options.sample,
        "run": run,
        "killed": killed,
        "score": round(killed / run, 4),
        "modules": rows,
    }
    print(f"{killed} of {run} killed: {100 * killed / run:.1f} %")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
