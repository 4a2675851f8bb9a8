"""``python -m eval VERB``: everything that measures or checks this package, behind one command.

``python -m eval`` lists the verbs; ``python -m eval VERB --help`` says what one needs and how it ends.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence

from eval.verbs import VERBS, Verb

WRONG_USE = 2


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
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name not in VERBS:
        print(f"verb: wanted one of {', '.join(VERBS)}, got {name!r}", file=sys.stderr)
        return WRONG_USE
    return _run(name, VERBS[name], given[1:])


def overview() -> str:
    """Every verb with what it answers and needs."""
    lines = ["usage: python -m eval VERB [OPTIONS], or VERB --help", ""]
    for name, verb in VERBS.items():
        lines += [f"  {name:<14}{verb.summary}", f"  {'':<14}{verb.needs}"]
    return "\n".join(lines)


def _run(name: str, verb: Verb, options: list[str]) -> int:
    try:
        module = importlib.import_module(f"eval.{verb.module}")
    except ModuleNotFoundError as error:
        print(f"{name}: wanted the package {error.name}, got none: pip install -e '.[eval]'", file=sys.stderr)
        return WRONG_USE
    if "-h" in options or "--help" in options:
        print(f"{verb.needs}\nExit codes: {verb.exits}.\n")
    before = sys.argv
    sys.argv = [f"python -m eval {name}", *options]  # argparse calls the program by it
    try:
        if "argv" in inspect.signature(module.main).parameters:
            return int(module.main(options))
        import typer

        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(help=module.__doc__)(module.main)
        app(args=options, prog_name=sys.argv[0])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return 0


if __name__ == "__main__":
    sys.exit(main())
