"""``python -m eval VERB``: everything that measures or checks this package, behind one command.

``python -m eval`` lists the verbs; ``python -m eval VERB --help`` says what one needs and how it ends.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from eval.common.status import INTERRUPTED, WRONG_USE
from eval.verbs import VERBS, Verb

BROKEN_PIPE = 141
"""Status of a program whose reader has gone, as a shell gives it for SIGPIPE."""

COLUMNS = 100
"""Width of the texts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb.

    Parameters
    ----------
    arguments : sequence of str, optional
        The verb and its options; default: those of the process.

    Returns
    -------
    int
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    try:
        if name in ("-h", "--help"):
            print(overview())
            status = 0
        elif name not in VERBS:
            print(_wrapped(f"verb: wanted one of {', '.join(VERBS)}, got {name!r}"), file=sys.stderr)
            status = WRONG_USE
        else:
            status = _run(name, VERBS[name], given[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more as it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _interrupted()
    return status


def overview() -> str:
    """Every verb with what it answers and needs."""
    lines = ["usage: python -m eval VERB [OPTIONS], or VERB --help", ""]
    for name, verb in VERBS.items():
        lines += [
            _wrapped(verb.summary, f"  {name:<14}", f"  {'':<14}"),
            _wrapped(verb.needs, f"  {'':<16}", f"  {'':<16}"),
        ]
    return "\n".join(lines)


def _wrapped(text: str, first: str = "", others: str = "") -> str:
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _run(name: str, verb: Verb, options: list[str]) -> int:
    if "-h" in options or "--help" in options:
        # Before the module is imported: it may need a package that is not there.
        print(f"{_wrapped(verb.needs)}\n{_wrapped(f'Exit codes: {verb.exits}.')}\n", flush=True)
    try:
        module = importlib.import_module(f"eval.{verb.module}")
    except ModuleNotFoundError as error:
        print(f"{name}: wanted the package {error.name}, got none: pip install -e '.[eval]'", file=sys.stderr)
        return WRONG_USE
    before = sys.argv
    sys.argv = [f"python -m eval {name}", *options]  # argparse calls the program by it
    try:
        return _call(module, options)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before


def _call(module: ModuleType, options: list[str]) -> int:
    if "argv" in inspect.signature(module.main).parameters:
        return int(module.main(options))
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=module.__doc__)(_with_endings(module.main))
    app(args=options, prog_name=sys.argv[0])
    return 0


def _with_endings(function: Callable[..., None]) -> Callable[..., None]:
    """The function of a verb, ended by its own statuses where typer would end it with 1."""
    import typer

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(_interrupted()) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None

    return run


if __name__ == "__main__":
    sys.exit(main())
