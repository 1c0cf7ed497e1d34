"""Lines of aligned columns, for tables on a terminal."""

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
