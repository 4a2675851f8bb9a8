"""How the evaluation scripts end when something other than a result ends them.

The statuses are those of `eval.common.status`.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from eval.campaigns.prompts import InputError
from eval.campaigns.store import StoreBusy, StoreError
from eval.common.status import INTERRUPTED, TOOL_FAULT, UNDECIDED, WRONG_USE
from gvr_topk.config import ConfigError
from gvr_topk.integrations.environment import DISABLE, disabled

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """The process was asked to end by a signal; not an `Exception`, so that no handler of errors keeps it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def clean_exits() -> Iterator[None]:
    """Give every way of ending its documented exit status.

    Within the block SIGTERM and SIGHUP raise `Terminated`, so that ``finally`` blocks end what was started.
    Python's own exit status of an uncaught exception is 1, which here would mean a regression.
    """
    with _ending_signals():
        try:
            yield
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except (InputError, ConfigError, StoreBusy) as error:
            _leave(WRONG_USE, f"error: {error}")
        except KeyboardInterrupt:
            _leave(INTERRUPTED, "interrupted; the same command goes on from here")
        except Terminated as end:
            _leave(128 + end.number, f"ended by {end}; the same command goes on from here")
        except (StoreError, OSError) as error:
            _leave(TOOL_FAULT, f"error: {error}")
        except Exception:
            traceback.print_exc()
            _leave(TOOL_FAULT, "error: the evaluation script itself failed; the runs that finished are kept")


def refuse_disabled() -> None:
    """Refuse to start where ``GVR_TOPK_DISABLE`` switches the integration off.

    Raises
    ------
    typer.Exit
        With the status of an undecided campaign: no run could show anything about the heuristic top-k.
    """
    if disabled():
        typer.echo(f"{DISABLE} is set: the heuristic top-k cannot run, so nothing is measured", err=True)
        raise typer.Exit(UNDECIDED)


def _leave(status: int, line: str) -> None:
    typer.echo(line, err=True)
    raise typer.Exit(status) from None


@contextmanager
def _ending_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread
        return
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _ENDING}

    def end(number: int, frame: FrameType | None) -> None:
        for other in _ENDING:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise Terminated(number)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup asks for SIGHUP to be ignored
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
