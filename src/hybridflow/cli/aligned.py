"""Lines of aligned columns, for tables on a terminal, and text from files that a terminal must not obey."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, ends_with_text: bool = False) -> list[str]:
    """Return a line for each row: the first column to the left, the others to the right.

    With `ends_with_text` the last column is to the left too.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        if ends_with_text:
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def printable(text: str) -> str:
    """Return a text in one line, with control characters, changes of direction and broken UTF-8 as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
