"""Text tables that read well in a terminal and render as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned Markdown table; the first column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in (headers, *rows)) for index in range(len(headers))]
    rule = [("-" * width if index == 0 else "-" * (width - 1) + ":") for index, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(headers), line(rule), *(line(row) for row in rows)])
