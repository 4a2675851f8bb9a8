"""Mutation testing: how many small faults, put into a module one at a time, its tests notice.

    python tests/mutation/run.py --out tests/mutation/report.json
    python tests/mutation/run.py --only gvr_topk/state.py --sample 0
    python tests/mutation/run.py --changed-since HEAD~1 --seconds 60

A mutant differs from its module in one place: a comparison moves by one, ``+`` becomes ``-``, an integer
grows by one, a condition is negated, ``and`` becomes ``or``. Each runs in a forked process, so that torch is
imported once, and against the tests in `TARGETS` alone. A mutant is killed when a test fails or runs out of
time. ``--sample`` takes so many mutants of each module, drawn with a fixed seed; 0 takes all. With
``--only`` the other modules keep their rows of a report that lies there. A row has the hash of the source it
is about, and a row that is kept although its module has changed since is marked as older.

``--changed-since`` mutates nothing but the lines that differ from where HEAD left a commit, uncommitted
ones included, in an order drawn with the same seed, until ``--seconds`` are spent. The exit status is 1 where
one of these mutants survives. A mutant that changes no behaviour is left out, in both modes, by a comment
``pragma: no mutate`` on its line, with the reason behind it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEED = 21
TIMEOUT_S = 120
CPU_LIMIT_S = 2 * TIMEOUT_S
MEMORY_LIMIT = 8 << 30
LEFT_OUT = "pragma: no mutate"

# What is left out takes seconds a mutant and adds nothing to the tests beside it. The tests of a module may
# take half a minute, so that `make mutation-changed` ends within two.
_OPS = (
    "test_ops.py",
    str(ROOT / "tests/cpu/test_prefill.py"),
    str(ROOT / "tests/cpu/test_blocks.py"),
    "-k",
    "not opcheck and not compiled",
)
_VLLM = ("test_integration_vllm.py", "-k", "not doctor and not register_imports and not entry_point")
_TENSORRT_LLM = (
    "test_integration_models.py",
    str(ROOT / "tests/cpu/test_integration_steps.py"),
    str(ROOT / "tests/cpu/test_integration_drafts.py"),
    str(ROOT / "tests/cpu/test_integration_counters.py"),
    "-k",
    "not 1_3_package and not rc25 and not that_of_the_last_accepted and (not same_sets or compressed)",
)

TARGETS: dict[str, tuple[str, ...]] = {
    "eval/common/evidence.py": ("test_eval_evidence.py",),
    "eval/common/order.py": ("test_eval_sequential.py",),
    "eval/common/pairing.py": ("test_eval_sequential.py",),
    "eval/common/pairs.py": ("test_eval_inputs.py",),
    "eval/common/plan.py": ("test_eval_plan.py",),
    "eval/common/sequential.py": ("test_eval_sequential.py",),
    "eval/common/store.py": ("test_eval_store.py",),
    "eval/common/verdicts.py": ("test_eval_verdicts.py", str(ROOT / "tests/cpu/test_eval_sequential.py")),
    "gvr_topk/arguments.py": _OPS,
    "gvr_topk/contract.py": (
        "test_contract.py",
        str(ROOT / "tests/cpu/test_prefill.py"),
        str(ROOT / "tests/cpu/test_blocks.py"),
        "-k",
        "not opcheck and not compiled",
    ),
    "gvr_topk/cpu.py": _OPS,
    "gvr_topk/layers.py": ("test_layers.py",),
    "gvr_topk/ops.py": _OPS,
    "gvr_topk/policy.py": ("test_policy.py",),
    "gvr_topk/request_slots.py": ("test_request_slots.py",),
    "gvr_topk/state.py": ("test_state.py",),
    "gvr_topk/evaluation/oracle.py": ("test_oracle.py",),
    "gvr_topk/evaluation/paper_reference.py": (
        "test_paper_reference.py",
        "-k",
        "not shipped and not adversarial",
    ),
    "gvr_topk/evaluation/replay.py": ("test_replay.py",),
    "gvr_topk/evaluation/trace.py": ("test_trace.py",),
    "gvr_topk/integrations/counters.py": ("test_integration_counters.py",),
    "gvr_topk/integrations/hint_state.py": _TENSORRT_LLM,
    "gvr_topk/integrations/layer_hook.py": _TENSORRT_LLM,
    "gvr_topk/integrations/selection.py": _TENSORRT_LLM,
    "gvr_topk/integrations/sglang/row_state.py": ("test_sglang.py",),
    "gvr_topk/integrations/sglang/transforms.py": ("test_sglang.py",),
    "gvr_topk/integrations/vllm/hook.py": _VLLM,
    "gvr_topk/integrations/vllm/prefill.py": _VLLM,
    "gvr_topk/integrations/vllm/rows.py": _VLLM,
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


class Mutant(NamedTuple):
    """One changed place of a module.

    Attributes
    ----------
    line, last_line : int
        Lines of the expression that is changed.
    change : str
    tree : ast.Module
        The whole module with the change.
    """

    line: int
    last_line: int
    change: str
    tree: ast.Module


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


MUTABLE = (ast.Compare, ast.BinOp, ast.BoolOp, ast.Constant, ast.If, ast.IfExp, ast.While)
"""Kinds of node that `mutate` may change."""


def mutants(source: str, lines: set[int] | None = None) -> list[Mutant]:
    """Every mutant of a module, or of these lines; annotations, decorators and messages are left alone."""
    tree = ast.parse(source)
    text = source.splitlines()
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
        line = getattr(node, "lineno", 0)
        if not isinstance(node, MUTABLE) or id(node) in skipped or (line and LEFT_OUT in text[line - 1]):
            continue
        # The body of a statement is no part of what is changed.
        last = node.test if isinstance(node, ast.If | ast.While) else node
        end = getattr(last, "end_lineno", None) or line
        if lines is not None and lines.isdisjoint(range(line, end + 1)):
            continue
        # Only now: a copy of the whole tree takes milliseconds.
        changed = copy.deepcopy(tree)
        twin = list(ast.walk(changed))[index]
        for change in mutate(twin):
            found.append(Mutant(line, end, change, ast.fix_missing_locations(changed)))
    return found


def parse_diff(diff: str) -> dict[str, set[int]]:
    """Lines that a ``git diff --unified=0 --no-prefix`` adds or changes, by their numbers in the new file."""
    lines: dict[str, set[int]] = {}
    path = ""
    for text in diff.splitlines():
        if text.startswith("+++ "):
            path = text[4:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", text):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    return lines


def changed_mutants(ref: str, modules: Iterable[str]) -> list[tuple[str, Mutant]]:
    """Module and mutant for every mutant of a line that differs from the merge base with `ref`, drawn."""
    base = _git("merge-base", ref, "HEAD").strip()
    diff = _git("diff", "--unified=0", "--no-prefix", "--no-ext-diff", "--no-color", base, "--", *modules)
    found = []
    for module, lines in parse_diff(diff).items():
        if module not in TARGETS:  # removed since
            continue
        source = (ROOT / module).read_text(encoding="utf-8")
        found += [(module, mutant) for mutant in mutants(source, lines)]
    random.Random(SEED).shuffle(found)  # a spent budget then leaves out no module as a whole
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.stderr.write(f"{' '.join(command)}: {done.stderr.strip() or 'no such commit'}\n")
        raise SystemExit(2)
    return done.stdout


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


def survives(module: str, tree: ast.Module | None, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether all tests of a module pass, in time, with the changed tree in its place."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # what the tests start ends with them
            # A fault may loop for ever, or fill the memory: it ends even if nobody is there to end it.
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1), os.dup2(sink, 2)
            if tree is not None:
                sys.meta_path.insert(0, Mutated(module[:-3].replace("/", "."), ROOT / module, tree))
            import pytest
            from hypothesis import Phase, settings

            # A fault is noticed by the first example that fails; to look for a smaller one takes minutes.
            some = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
            settings.register_profile("mutation", deadline=None, derandomize=True, phases=some)
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
                "--hypothesis-profile=mutation",
            ]
            os._exit(int(pytest.main([*options, *chosen, str(ROOT / "tests" / "cpu" / name)])))
        except BaseException:
            os._exit(99)
    deadline = time.monotonic() + timeout_s
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


def prepare() -> None:
    """Import once what every test imports."""
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


def require_passing(module: str) -> float:
    """Seconds that the tests of an unchanged module take; ends the program where they fail."""
    start = time.monotonic()
    if not survives(module, None):
        raise SystemExit(f"{module}: wanted its tests to pass without a mutant, got a failure")
    return time.monotonic() - start


def check_changed(ref: str, modules: Iterable[str], seconds: float) -> int:
    """Run mutants of changed lines until the budget is spent; the exit status.

    Parameters
    ----------
    ref : str
        Lines that differ from the merge base of this commit and HEAD are mutated.
    modules : iterable of str
    seconds : float
        No mutant is started after so many seconds, beside the first. The tests of an unchanged module, which
        have to pass before its first mutant, are counted too.

    Returns
    -------
    int
        1 when a mutant survives.
    """
    start = time.monotonic()
    drawn = changed_mutants(ref, modules)
    if not drawn:
        print(f"mutation: no line with a mutant was changed since {ref}")
        return 0
    took: dict[str, float] = {}
    run = survivors = 0
    for module, mutant in drawn:
        if run > 0 and time.monotonic() - start >= seconds:
            break
        if not took:
            prepare()
        if module not in took:
            took[module] = require_passing(module)
        run += 1
        if survives(module, mutant.tree, min(TIMEOUT_S, 5 + 5 * took[module])):
            survivors += 1
            print(f"{module}:{mutant.line}: survives: {mutant.change}", flush=True)
    text = f"mutation: {run - survivors} of {run} mutants of the lines changed since {ref} killed"
    if run < len(drawn):
        text += f", {len(drawn) - run} left after {time.monotonic() - start:.0f} s of {seconds:g} s"
    print(text)
    return int(survivors > 0)


def hash_of(module: str) -> str:
    """Hash of the source of a module as it is now."""
    return hashlib.sha256((ROOT / module).read_bytes()).hexdigest()[:16]


def commit() -> str:
    """The commit whose modules are run, and whether the working tree differs from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_report(modules: Iterable[str], sample: int, out: Path | None, kept: Mapping[str, Any]) -> None:
    """Run a sample of each module's mutants; `kept` are rows of modules that are not run."""
    prepare()
    rows = []
    for module in modules:
        require_passing(module)
        source = hash_of(module)
        every = mutants((ROOT / module).read_text(encoding="utf-8"))
        chosen = every
        if 0 < sample < len(every):
            chosen = random.Random(SEED).sample(every, sample)
        alive = [
            {"line": mutant.line, "change": mutant.change}
            for mutant in chosen
            if survives(module, mutant.tree)
        ]
        killed = len(chosen) - len(alive)
        rows.append(
            {
                "module": module,
                "source": source,
                "mutants": len(every),
                "run": len(chosen),
                "killed": killed,
                "survivors": alive,
            }
        )
        print(f"{module}: {killed} of {len(chosen)} killed, survivors {alive}", flush=True)
    for module, row in kept.items():
        is_older = row.get("source") != hash_of(module)
        rows.append({**{name: value for name, value in row.items() if name != "older"}, "older": is_older})
        if is_older:
            print(f"{module}: its row is older than the module")
    rows = sorted(rows, key=lambda row: list(TARGETS).index(row["module"]))
    run, killed = sum(row["run"] for row in rows), sum(row["killed"] for row in rows)
    report = {
        "format": "gvr_topk.mutation/1",
        "commit": commit(),
        "seed": SEED,
        "sample": sample,
        "run": run,
        "killed": killed,
        "score": round(killed / run, 4),
        "modules": rows,
    }
    print(f"{killed} of {run} killed: {100 * killed / run:.1f} %")
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the mutants that the tests notice.")
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="a module; repeatable")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each module; 0 for all")
    parser.add_argument("--out", type=Path, help="where to write the report")
    parser.add_argument("--changed-since", metavar="REF", help="mutate the lines changed since a commit")
    parser.add_argument("--seconds", type=float, default=60, help="budget of --changed-since")
    options = parser.parse_args()
    modules = options.only or list(TARGETS)
    if options.changed_since is not None:
        if options.out is not None:
            parser.error("--out: wanted none with --changed-since, whose figures are no score")
        raise SystemExit(check_changed(options.changed_since, modules, options.seconds))
    kept = {}
    if options.out is not None and options.only and options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["modules"]
        others = set(TARGETS) - set(modules)
        kept = {row["module"]: row for row in rows if row["module"] in others}
    write_report(modules, options.sample, options.out, kept)


if __name__ == "__main__":
    main()
