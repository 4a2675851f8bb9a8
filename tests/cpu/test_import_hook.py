"""The import hook among other finders, and what a callback may raise."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import gvr_topk_autoload

ROOT = Path(__file__).resolve().parents[2]
WATCHED, OTHER = "watched_module", "other_module"


class Hook(gvr_topk_autoload.Finder):
    watched = (WATCHED,)


class Second(gvr_topk_autoload.Finder):
    """Another finder of the same kind."""

    watched = (WATCHED,)


class Walker:
    """Asks all other finders, as many import hooks do, and knows no guard."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        for finder in sys.meta_path:
            if finder is not cls:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


class Bypass:
    """Asks the finder of folders alone, as the hooks of typeguard and jaxtyping do."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return PathFinder.find_spec(name, path) if name == WATCHED else None


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, list[str]]]:
    """Modules that each finder has called back for."""
    for name in (WATCHED, OTHER):
        (tmp_path / f"{name}.py").write_text("value = 7\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    seen: dict[Any, list[str]] = {Hook: [], Second: []}
    Hook.watch(seen[Hook].append)
    Second.callback = seen[Second].append
    yield seen
    Hook.stop()
    for name in (WATCHED, OTHER):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("other", [Walker, Second])
def test_a_finder_that_asks_all_others(other: Any, place: int, calls: Any) -> None:
    """In front of the hook and behind it."""
    sys.meta_path.insert(place, other)
    for _ in range(2):
        module = importlib.import_module(WATCHED)
        assert module.value == 7 and type(module.__loader__).__name__ == "SourceFileLoader"
        del sys.modules[WATCHED]
    assert calls == {Hook: [WATCHED] * 2, Second: [WATCHED] * 2 * (other is Second)}
    assert not Hook.missed


@pytest.mark.parametrize("place", [0, 1])
def test_a_module_that_is_not_there(place: int) -> None:
    sys.meta_path.insert(place, Walker)
    Path(importlib.util.find_spec(WATCHED).origin).unlink()  # type: ignore[union-attr, arg-type]
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(WATCHED)


def test_a_finder_that_hides_modules_is_named(calls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, at the next import of anything."""
    assert Hook.state() == "active"
    sys.meta_path.insert(0, Bypass)
    assert Hook.state() == f"active, behind {__name__}.Bypass"
    importlib.import_module(WATCHED)
    for _ in range(2):
        importlib.import_module(OTHER)
        del sys.modules[OTHER]
    assert calls[Hook] == []
    missed = f"{WATCHED} was imported past the import hook, behind {__name__}.Bypass"
    assert capsys.readouterr().err == f"gvr_topk: not active: {missed}\n"
    assert Hook.state() == f"bypassed: {WATCHED}, behind {__name__}.Bypass"
    Hook.stop()
    assert Hook.state() == ""


@pytest.mark.parametrize("loaded_before", [False, True])
def test_what_the_hook_has_seen_is_not_missed(
    capsys: pytest.CaptureFixture[str], loaded_before: bool, tmp_path: Path, calls: Any
) -> None:
    """A module may import others while it runs, and may have been there before the hook."""
    (tmp_path / f"{WATCHED}.py").write_text(f"import {OTHER}\n")
    if loaded_before:
        Hook.stop()
        importlib.import_module(WATCHED)
        Hook.start()
        del sys.modules[OTHER]
        importlib.import_module(OTHER)
    else:
        importlib.import_module(WATCHED)
        assert calls[Hook] == [WATCHED]
    assert not Hook.missed and capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [SystemExit("no licence"), ValueError("odd"), GeneratorExit()])
def test_an_error_of_the_callback_stops_no_import(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    Hook.callback = Mock(side_effect=error)
    assert importlib.import_module(WATCHED).value == 7
    assert capsys.readouterr().err == f"gvr_topk: not active: {type(error).__name__}: {error}\n"


def test_an_interrupt_passes() -> None:
    Hook.callback = Mock(side_effect=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(WATCHED)


def test_threads_do_not_hide_modules_from_each_other() -> None:
    """What one thread is looking for is no reason to answer another one with nothing."""
    program = f"""
import sys, threading
sys.path[:0] = [{str(ROOT)!r}, {sys.path[0]!r}]
import gvr_topk_autoload as autoload

class Hook(autoload.Finder):
    watched = ({WATCHED!r},)

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {WATCHED!r}:
            meeting.wait()
        return None

meeting = threading.Barrier(2, timeout=60)
Hook.start()
sys.meta_path.insert(1, Slow)
specs = []
threads = [threading.Thread(target=lambda: specs.append(Hook.find_spec({WATCHED!r}))) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print([type(spec.loader).__name__ for spec in specs])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("['Loader', 'Loader']\n", "")
