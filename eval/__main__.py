"""``python -m eval VERB``: everything that measures or checks this package, behind one command.

``python -m eval`` lists the verbs; ``python -m eval VERB --help`` says more of one.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from eval.common import status
from eval.verbs import VERBS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb.

    Parameters
    ----------
    arguments : sequence of str, optional
        The verb and its options; default: those of the process.

    Returns
    -------
    int
        The exit status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in VERBS:
        return _run(name, given[1:])
    if name in ("-h", "--help"):
        return _ended(print, overview())
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

        module = importlib.import_module(f"eval.{VERBS[name].module}")
    except ModuleNotFoundError as error:
        print(f"{name}: wanted the package {error.name}, got none: pip install -e '.[eval]'", file=sys.stderr)
        return status.WRONG_USE

    @functools.wraps(module.main)
    def command(*positional: Any, **named: Any) -> None:
        raise typer.Exit(_ended(module.main, *positional, **named))

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=module.__doc__)(command)
    try:
        app(args=options, prog_name=f"python -m eval {name}")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _ended(function: Callable[..., int | None], *positional: Any, **named: Any) -> int:
    """Status of a function that returns it, or None for 0; typer would end some cases with 1."""
    try:
        ended = function(*positional, **named) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more as it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status.BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return status.INTERRUPTED
    return ended


if __name__ == "__main__":
    sys.exit(main())
