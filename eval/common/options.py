"""Checks of command-line options that several evaluation scripts share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Annotated

import typer

TraceFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of .npz traces; adds the shipped one.", exists=True, file_okay=False),
]
"""Option for a folder of traces. One that is not there is refused: its traces would be missed in silence."""

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def refuse_repeats(values: Sequence[Hashable], option: str) -> None:
    """Refuse an option that is given the same value twice.

    A repeated task or setting would enter the statistics twice: its runs would be counted as twice as
    many, and an interval from the same figures would look narrower than it is.

    Raises
    ------
    typer.BadParameter
        With the option and the repeated values.
    """
    repeated = list(dict.fromkeys(value for value in values if values.count(value) > 1))
    if repeated:
        names = ", ".join(str(value) for value in repeated)
        raise typer.BadParameter(f"wanted each value once, got {names} more than once", param_hint=option)


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Type of an `argparse` option that takes one of some words."""

    def word(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"wanted one of {', '.join(known)}, got {text!r}")
        return text

    return word


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Type of an `argparse` option that takes some words, with commas between them."""

    def words(text: str) -> list[str]:
        given = text.split(",")
        if not set(given) <= set(known):
            raise argparse.ArgumentTypeError(f"wanted some of {', '.join(known)}, got {text!r}")
        return given

    return words


def at_least(minimum: int) -> Callable[[str], int]:
    """Type of an `argparse` option that takes an integer from `minimum` on."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"wanted an integer of at least {minimum}, got {text!r}")
        return value

    return number


def check_label(label: str, option: str) -> None:
    """Refuse a label that cannot be a folder's name; a path in it would write outside of the output.

    Raises
    ------
    typer.BadParameter
        With the option and the label.
    """
    if not _LABEL.fullmatch(label):
        raise typer.BadParameter(
            f"wanted a label of letters, digits and . _ + -, the first a letter or digit, got {label!r}",
            param_hint=option,
        )
