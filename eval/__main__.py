"""``python -m eval VERB``: everything that measures or checks this package, behind one command.

``python -m eval`` lists the verbs; ``python -m eval VERB --help`` says more of one.
"""

import functools
import importlib
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from eval.common import status
from eval.verbs import VERBS, module_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb with its options, by default those of the process, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in VERBS:
        return _run(name, given[1:])
    if name in ("-h", "--help"):
        return _ended(lambda: print(overview()))
    print(_wrapped(f"verb: wanted one of {', '.join(VERBS)}, got {name!r}"), file=sys.stderr)
    return status.WRONG_USE


def overview() -> str:
    """Every verb with what it answers and needs, and what statuses mean."""
    lines = ["usage: python -m eval VERB [OPTIONS], or VERB --help", ""]
    for name, verb in VERBS.items():
        lines.append(_wrapped(f"{verb.summary} (GPU: {verb.gpu})", f"  {name:<14}", " " * 16))
    return "\n".join([*lines, "", (status.__doc__ or "").strip()])


def _wrapped(text: str, first: str = "", others: str = "") -> str:
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _run(name: str, options: list[str]) -> int:
    try:
        import typer

        module = importlib.import_module(module_of(name))
    except ModuleNotFoundError as error:
        print(f"{name}: wanted the package {error.name}, got none: pip install -e '.[eval]'", file=sys.stderr)
        return status.WRONG_USE

    endings = (typer.Exit, typer.Abort, typer.BadParameter)

    @functools.wraps(module.main)
    def command(*positional: Any, **named: Any) -> None:
        raise typer.Exit(_ended(functools.partial(module.main, *positional, **named), endings))

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=module.__doc__)(command)
    try:
        app(args=options, prog_name=f"python -m eval {name}")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _ended(function: Callable[[], int | None], passed: tuple[type[Exception], ...] = ()) -> int:
    """Status of a function that returns it, or None for 0, and of every other way that it may end.

    Exceptions of the kinds `passed` are not its business. After others Python and typer would end with 1.
    SIGTERM and SIGHUP raise `SystemExit` meanwhile, so that ``finally`` blocks end what was started.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def end(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise SystemExit(128 + number)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup asks for SIGHUP to be ignored
            signal.signal(number, end)
    try:
        ended = function() or 0
        sys.stdout.flush()
        return ended
    except passed:
        raise
    except BrokenPipeError:
        # The interpreter flushes once more as it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status.BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return status.INTERRUPTED
    except status.InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return status.WRONG_USE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return status.TOOL_FAULT
    except Exception:
        traceback.print_exc()
        return status.TOOL_FAULT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
