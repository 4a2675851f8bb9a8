"""Text tables that read well in a terminal and render as Markdown."""

from collections.abc import Sequence


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned Markdown table; the first column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in (headers, *rows)) for index in range(len(headers))]
    rule = [("-" * width if index == 0 else "-" * (width - 1) + ":") for index, width in enumerate(widths)]
    padded = [
        [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (headers, rule, *rows)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)
