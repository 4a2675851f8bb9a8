"""Running the tests of one module against its mutants, each in a forked process.

The tests are collected once. Their first run traces which lines of the module each test executes; tests that
execute none are dropped, and for a mutant those that execute its lines come first. A mutant of a function's
body replaces the code of the function in a fork of the process that has collected. A mutant of what runs at
import, and of what collecting the tests has executed, is imported in a fork that collects anew.
"""

from __future__ import annotations

import ast
import gc
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
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
MEMORY_LIMIT = 8 << 30
BROKEN, NOT_IN_PLACE = 99, 98


class Baseline(NamedTuple):
    """What the unchanged module's tests take."""

    cpu_s: float  # of all tests together, traced
    wall_s: float
    imported: list[int]  # lines that are executed before the first test
    lines: list[list[int]]  # of the module that each test executes
    seconds: list[float]  # of each test


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves one module from a changed tree."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.name, self.path, self.tree = module[:-3].replace("/", "."), ROOT / module, tree
        self.name = self.name.removesuffix(".__init__")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname == self.name:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)  # type: ignore[arg-type]
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


class Tracer:
    """Records which lines of one file run."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = str(path), set[int]()

    def start(self) -> None:
        self.lines = set()
        sys.settrace(self._enter)

    def stop(self) -> list[int]:
        sys.settrace(None)
        return sorted(self.lines)

    def _enter(self, frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename != self.path:
            return None
        self.lines.add(frame.f_lineno)
        return self._line

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        self.lines.add(frame.f_lineno)
        return self._line


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


def _exit(*_: object) -> None:
    raise SystemExit(BROKEN)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Return a code object and all inside it, in the order of the source."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


class Patcher:
    """Puts the code of mutants into the functions of a module that is imported already."""

    def __init__(self, module: str) -> None:
        self.path = str(ROOT / module)
        self.functions = [
            found
            for found in gc.get_objects()
            if isinstance(found, FunctionType) and found.__code__.co_filename == self.path
        ]
        source = Path(self.path).read_text(encoding="utf-8")
        self.codes = list(codes(compile(source, self.path, "exec", dont_inherit=True)))

    def patch(self, tree: ast.Module) -> bool:
        """Change the module; false where that takes another import."""
        changed = list(codes(compile(tree, self.path, "exec", dont_inherit=True)))
        if [code.co_name for code in changed] != [code.co_name for code in self.codes]:
            return False
        new = {old: code for old, code in zip(self.codes, changed, strict=True) if old != code}
        patched = False
        for function in self.functions:
            if (code := new.get(function.__code__)) is not None:
                function.__code__ = code
                patched = True
        return patched


class Collected:
    """A pytest plugin that takes over once the tests are collected.

    Parameters
    ----------
    module : str
    chosen : sequence of Mutant
    jobs : int
    report : callable
        Takes what is found: ``("failure", text)`` of a test that fails without a mutant, ``("baseline",
        Baseline)``, and ``(number, status)`` of each mutant.
    """

    def __init__(
        self, module: str, chosen: Sequence[Mutant], jobs: int, report: Callable[[Any, Any], None]
    ) -> None:
        self.module, self.chosen, self.jobs, self.report = module, chosen, jobs, report
        self.tracer = Tracer(ROOT / module)
        self.is_traced = False  # only in the fork that runs the unchanged module
        self.lines: list[list[int]] = []
        self.seconds: list[float] = []
        self.tracer.start()

    def pytest_runtestloop(self, session: Any) -> bool:
        imported = self.tracer.stop()
        if session.testsfailed:
            return True
        gc.collect()
        gc.freeze()
        patcher = Patcher(self.module)
        with tempfile.TemporaryDirectory() as folder:
            noted = Path(folder) / "baseline.json"
            start = time.monotonic()
            pid = fork(lambda: self._trace(session, noted))
            _, status, usage = os.wait4(pid, 0)
            end(pid)
            if status != 0:
                return True
            lines, seconds = json.loads(noted.read_text())
        baseline = Baseline(
            usage.ru_utime + usage.ru_stime, time.monotonic() - start, imported, lines, seconds
        )
        self.report("baseline", baseline)
        limits = limits_of(baseline)
        works = []
        numbers = []
        for number, mutant in enumerate(self.chosen):
            if needs_import(mutant, baseline):
                continue
            numbers.append(number)
            works.append(lambda mutant=mutant: self._run(session, mutant, baseline, patcher))
        for index, status in run_all(works, self.jobs, *limits):
            self.report(numbers[index], status)
        return True

    def _trace(self, session: Any, noted: Path) -> int:
        from _pytest.main import pytest_runtestloop

        self.is_traced = True
        pytest_runtestloop(session)
        noted.write_text(json.dumps([self.lines, self.seconds]))
        return int(session.testsfailed > 0)

    def _run(self, session: Any, mutant: Mutant, baseline: Baseline, patcher: Patcher) -> int:
        from _pytest.main import pytest_runtestloop

        if not patcher.patch(mutant.tree()):
            return NOT_IN_PLACE
        touching = [index for index in order_of_tests(mutant, baseline) if baseline.lines[index]]
        session.items[:] = [session.items[index] for index in touching]
        try:
            pytest_runtestloop(session)
        except session.Failed:  # because of -x
            return 1
        return int(session.testsfailed > 0)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.report("failure", f"{report.nodeid}\n{report.longreprtext}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.is_traced:
            self.pytest_collectreport(report)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        if not self.is_traced:
            yield
            return
        start = time.monotonic()
        self.tracer.start()
        yield
        self.lines.append(self.tracer.stop())
        self.seconds.append(time.monotonic() - start)


class Ordered:
    """A pytest plugin that puts the tests first which execute the changed lines."""

    def __init__(self, mutant: Mutant, baseline: Baseline) -> None:
        self.mutant, self.baseline = mutant, baseline

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if len(items) == len(self.baseline.lines):  # else the mutant has changed which tests there are
            items[:] = [items[index] for index in order_of_tests(self.mutant, self.baseline)]


def limits_of(baseline: Baseline) -> tuple[float, float]:
    """Seconds of the processor, and of the clock, that a mutant's tests may take."""
    return 20 + 4 * baseline.cpu_s, 60 + 10 * baseline.wall_s


def needs_import(mutant: Mutant, baseline: Baseline) -> bool:
    """Whether a change in a function that exists already would come too late."""
    return not mutant.in_function or not set(baseline.imported).isdisjoint(_lines(mutant))


def order_of_tests(mutant: Mutant, baseline: Baseline) -> list[int]:
    """Numbers of the tests: those that execute the changed lines are first, and of these the quick ones."""
    changed = _lines(mutant)
    each = enumerate(zip(baseline.lines, baseline.seconds, strict=True))
    ranked = [
        (changed.isdisjoint(lines), not lines, seconds > 0.3, index) for index, (lines, seconds) in each
    ]
    return [index for *_, index in sorted(ranked)]


def _lines(mutant: Mutant) -> set[int]:
    return set(range(mutant.line, mutant.last_line + 1))


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


def run_mutants(
    module: str,
    tests: Sequence[str],
    chosen: Sequence[Mutant],
    jobs: int = 1,
) -> Iterator[tuple[int, int]]:
    """Run the tests of a module against mutants.

    Yields
    ------
    tuple of int
        Number of a mutant in `chosen`, and the exit status of its tests: 0 where it survives. They come as
        the tests end.

    Raises
    ------
    SystemExit
        The tests fail without a mutant; the message holds what failed.
    """
    read, write = os.pipe()

    def report(name: Any, value: Any) -> None:
        os.write(write, (json.dumps([name, value]) + "\n").encode())

    def serve() -> int:
        signal.signal(signal.SIGTERM, _exit)  # ends the forks, too
        plugin = Collected(module, chosen, jobs, report)
        status = int(pytest.main(options_of(tests), plugins=[plugin]))
        plugin.tracer.stop()
        return status

    def run_alone(mutant: Mutant) -> int:
        sys.meta_path.insert(0, Mutated(module, mutant.tree()))
        return int(pytest.main(options_of(tests), plugins=[Ordered(mutant, baseline)]))

    pid = fork(serve)
    os.close(write)
    baseline, failure = None, "no test has run"
    left = set(range(len(chosen)))
    try:
        with os.fdopen(read) as lines:
            for line in lines:
                name, value = json.loads(line)
                if name == "baseline":
                    baseline = Baseline(*value)
                elif name == "failure":
                    failure = value
                elif value != NOT_IN_PLACE:
                    left.discard(name)
                    yield name, value
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        end(pid)
    if baseline is None:
        raise SystemExit(f"{module}: wanted its tests to pass without a mutant, got a failure: {failure}")
    numbers = sorted(left)
    works = [lambda number=number: run_alone(chosen[number]) for number in numbers]
    for index, status in run_all(works, jobs, *limits_of(baseline)):
        yield numbers[index], status
