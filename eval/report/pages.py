"""Render a page's figures from a template: Markdown, of which paragraphs and items are filled anew."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2

WIDTH = 120
"""Columns of a line of text."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def shown(figure: float | None, digits: int = 1) -> str:
    """A figure as tables and sentences show it."""
    return "-" if figure is None else f"{figure:,.{digits}f}"


def word(number: int) -> str:
    """A small number in words."""
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: ``a, b and c``."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def table(headers: str | Sequence[str], rows: Iterable[Iterable[str]], align: str = "l") -> str:
    """A Markdown table; headers may be one text with bars between the columns.

    Of the first columns `align` says ``l`` or ``r``; the others are to the right.
    """
    names = headers.split(" | ") if isinstance(headers, str) else headers
    rule = "".join("---|" if side == "l" else "---:|" for side in align.ljust(len(names), "r"))
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    return "\n".join([lines[0], f"|{rule}", *lines[1:]])


def render(template: str, **values: object) -> str:
    """Text of a page's figures, from a file of ``templates``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"us": shown, "commas": "{:,}".format, "word": word}
    environment.globals["table"] = table
    return reflow(environment.get_template(template).render(values))


def reflow(text: str) -> str:
    """Fill the paragraphs and list items of a text, which blank lines part; tables stay as they are."""
    items = (item for block in re.split(r"\n\s*\n", text) for item in re.split(r"\n(?=- )", block.strip()))
    filled = "\n\n".join(item if item.startswith("|") else _fill(item) for item in items if item)
    return re.sub(r"(?m)(^(?:- |  ).*)\n\n(?=- )", r"\1\n", filled)


def _fill(text: str) -> str:
    others = "  " if text.startswith("- ") else ""
    words = " ".join(text.split())
    return textwrap.fill(
        words, WIDTH, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
