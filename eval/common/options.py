"""Checks of command-line options that several evaluation scripts share."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import typer

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
