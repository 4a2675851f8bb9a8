"""Running the tests of a module against its mutants, each in a forked process that imports the module anew.

Before, the unchanged module's tests run once and are traced: for a mutant those that execute its lines come
first.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import pytest

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
MEMORY_LIMIT = 8 << 30
BROKEN = 99


class Baseline(NamedTuple):
    """What the unchanged module's tests take."""

    cpu_s: float  # of all tests together, traced
    wall_s: float
    lines: list[list[int]]  # of the module that each test executes
    seconds: list[float]  # of each test


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves one module from a changed tree."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.name, self.path, self.tree = module[:-3].replace("/", "."), ROOT / module, tree
        self.name = self.name.removesuffix(".__init__")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        folders = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        make: Any = importlib.util.spec_from_file_location
        return make(fullname, self.path, loader=self, submodule_search_locations=folders)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def prepare() -> None:
    """Import once what every test imports, and the package from this checkout alone."""
    os.chdir(ROOT)
    # That of an editable install, which may be of another checkout, comes before all folders.
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"
    ]
    os.environ["CI"] = "true"  # hypothesis then draws the same examples in every run
    for name in ("torch", "numpy", "pytest", "hypothesis", "hypothesis.extra.numpy", "pydantic"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def fork(work: Callable[[], int], cpu_s: float = 0) -> int:
    """Run `work` in a process of its own, without output, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # what the tests start ends with them
        # A fault may loop for ever, or fill the memory: it ends even if nobody is there to end it.
        if cpu_s:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1), os.dup2(sink, 2)
        folder = tempfile.mkdtemp(prefix="mutant")
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            status = work()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(status)
    except BaseException:
        os._exit(BROKEN)


def end(pid: int) -> None:
    """End a process that `fork` has made, and what it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_all(
    works: Sequence[Callable[[], int]], jobs: int, cpu_s: float, wall_s: float
) -> Iterator[tuple[int, int]]:
    """Run every `work`, `jobs` at once; yield the number of each with its exit status, as they end."""
    waiting = list(enumerate(works))[::-1]
    running: dict[int, tuple[int, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, work = waiting.pop()
                running[fork(work, cpu_s)] = (number, time.monotonic() + wall_s)
            for pid, (number, deadline) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() > deadline
                if done or late:
                    end(pid)
                    if not done:
                        os.waitpid(pid, 0)
                    del running[pid]
                    yield number, os.waitstatus_to_exitcode(status) if done else -signal.SIGKILL
            time.sleep(0.01)
    finally:
        for pid in running:
            end(pid)


class Traced:
    """A pytest plugin that notes the lines of a module which each test executes, its time, and a failure."""

    def __init__(self, module: str) -> None:
        self.path = str(ROOT / module)
        self.executed = set[int]()
        self.lines: list[list[int]] = []
        self.seconds: list[float] = []
        self.failure = ""

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failure = f"{report.nodeid}\n{report.longreprtext}"

    pytest_runtest_logreport = pytest_collectreport

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.executed = set()
        start = time.monotonic()
        sys.settrace(self._enter)
        yield
        sys.settrace(None)
        self.lines.append(sorted(self.executed))
        self.seconds.append(time.monotonic() - start)

    def _enter(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._line(frame, event, value) if frame.f_code.co_filename == self.path else None

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        self.executed.add(frame.f_lineno)
        return self._line


class Ordered:
    """A pytest plugin: tests that execute the changed lines are first, and of these the quick ones."""

    def __init__(self, mutant: Mutant, baseline: Baseline) -> None:
        changed = set(range(mutant.line, mutant.last_line + 1))
        each = enumerate(zip(baseline.lines, baseline.seconds, strict=True))
        ranks = [
            (changed.isdisjoint(lines), not lines, seconds > 0.3, number) for number, (lines, seconds) in each
        ]
        self.order = [number for *_, number in sorted(ranks)]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if len(items) == len(self.order):  # else the mutant has changed which tests there are
            items[:] = [items[number] for number in self.order]


def options_of(tests: Sequence[str]) -> list[str]:
    """Return the arguments of pytest."""
    from hypothesis import Phase, settings

    # A fault is noticed by the first example that fails; to look for a smaller one takes minutes.
    some = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
    settings.register_profile("mutation", deadline=None, derandomize=True, phases=some)
    names = [str(ROOT / "tests/cpu" / test) if test.endswith(".py") else test for test in tests]
    without = [part for name in ("cacheprovider", "timeout", "xdist") for part in ("-p", f"no:{name}")]
    blank = ["-o", "addopts=", "-o", "timeout=", "--capture=sys", "--hypothesis-profile=mutation"]
    return ["-x", "-q", *without, *blank, *names]


def measure(module: str, tests: Sequence[str]) -> Baseline:
    """Run the tests of the unchanged module; a failure is a `SystemExit` that says which."""

    def run() -> int:
        # Served as a mutant is, so that this serving fails no test.
        sys.meta_path.insert(0, Mutated(module, ast.parse((ROOT / module).read_text())))
        traced = Traced(module)
        status = int(pytest.main(options_of(tests), plugins=[traced]))
        noted.write_text(json.dumps([traced.lines, traced.seconds, traced.failure]))
        return status

    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "baseline.json"
        start = time.monotonic()
        pid = fork(run)
        try:
            _, status, usage = os.wait4(pid, 0)
        finally:
            end(pid)
        lines, seconds, failure = json.loads(noted.read_text()) if noted.exists() else ([], [], "")
    if status:
        failure = failure or "no test has run"
        raise SystemExit(f"{module}: wanted its tests to pass without a mutant, got a failure: {failure}")
    return Baseline(usage.ru_utime + usage.ru_stime, time.monotonic() - start, lines, seconds)


def run_mutants(
    module: str, tests: Sequence[str], chosen: Sequence[Mutant], jobs: int = 1
) -> Iterator[tuple[int, int]]:
    """Run the tests of a module against mutants.

    As the tests of each end, the mutant's number in `chosen` is yielded with their exit status, 0 where it
    survives.
    """
    baseline = measure(module, tests)

    def run(mutant: Mutant) -> int:
        sys.meta_path.insert(0, Mutated(module, mutant.tree()))
        return int(pytest.main(options_of(tests), plugins=[Ordered(mutant, baseline)]))

    # Code of a mutant may loop for ever.
    limits = 20 + 4 * baseline.cpu_s, 60 + 10 * baseline.wall_s
    yield from run_all([functools.partial(run, mutant) for mutant in chosen], jobs, *limits)
