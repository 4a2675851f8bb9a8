"""Every way of ending has its own exit status, and 1 is a regression alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from eval.campaigns.exits import Terminated, clean_exits
from eval.campaigns.prompts import InputError
from eval.campaigns.store import StoreBusy, StoreError
from gvr_topk.config import ConfigError, Problem


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "status", "said"),
    [
        (_raise(InputError("prompt: wrong")), 2, "error: prompt: wrong"),
        (_raise(ConfigError([Problem("f", "k", "a", "b")])), 2, "error: f: k: wanted a, got b"),
        (_raise(StoreBusy("in use")), 2, "error: in use"),
        (_raise(StoreError("a folder")), 4, "error: a folder"),
        (_raise(PermissionError(13, "Permission denied", "/x")), 4, "Permission denied: '/x'"),
        (_raise(KeyError("figures")), 4, "KeyError: 'figures'"),
        (_raise(RecursionError("deep")), 4, "the evaluation script itself failed"),
        (_raise(KeyboardInterrupt()), 130, "interrupted; the same command goes on from here"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143, "ended by SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGHUP), 129, "ended by SIGHUP"),
        (_raise(typer.Exit(1)), 1, ""),
        (_raise(typer.Exit(0)), 0, ""),
    ],
)
def test_status(act: Callable[[], None], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    with pytest.raises(typer.Exit) as caught, clean_exits():
        act()
    assert caught.value.exit_code == status
    assert said in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before


def test_wrong_options_are_typers_to_report() -> None:
    with pytest.raises(typer.BadParameter), clean_exits():
        raise typer.BadParameter("x")


def test_a_second_signal_does_not_interrupt_the_clean_up() -> None:
    cleaned = []

    def act() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned.append(True)

    with pytest.raises(typer.Exit) as caught, clean_exits():
        act()
    assert caught.value.exit_code == 143 and cleaned


def test_errors_that_are_handled_do_not_swallow_the_end() -> None:
    def act() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:  # as around a single run
            pytest.fail("the signal must pass")

    with pytest.raises(typer.Exit) as caught, clean_exits():
        act()
    assert caught.value.exit_code == 143
    assert str(Terminated(signal.SIGHUP)) == "SIGHUP"


def test_nohup_is_obeyed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with clean_exits():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_may_use_it(tmp_path: Path) -> None:
    ended: list[int] = []

    def work() -> None:
        try:
            with clean_exits():
                (tmp_path / "none" / "x").write_text("")
        except typer.Exit as end:
            ended.append(end.exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [4]
