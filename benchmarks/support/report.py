"""What a benchmark prints: text tables, the command, and one JSON object as the last line."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from support.side import Side


@dataclass(frozen=True)
class Row:
    """One figure. `ratio`: how many times better than the peer; `limit`: what the matrix product of the run allows."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    limit: float | None = None
    ratio: float | None = None


def print_sides(sides: Sequence[Side], threads: int) -> None:
    """What is compared, before it is measured."""
    versions = {side.system: " ".join(f"{name} {version}" for name, version in side.versions.items()) for side in sides}
    print(f"threads on every side: {threads}; " + "; ".join(dict.fromkeys(versions.values())), flush=True)


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the first on the left, the others on the right."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    print(f"\n{title}")
    for line in (header, *lines):
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def print_rows(benchmark: str, rows: Sequence[Row]) -> None:
    """All rows as a table, the command that made them, and as the last line the same rows as JSON."""
    header = ("name", "unit", "ours", "peer", "limit", "ratio")
    cells = [(row.name, row.unit, *map(figure, (row.ours, row.peer, row.limit, row.ratio))) for row in rows]
    print_table(f"{benchmark} (ratio: how many times better than the peer)", header, cells)
    print(f"\ncommand: .venv/bin/python benchmarks/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}")
    print(json.dumps({"benchmark": benchmark, "rows": [_rounded(row) for row in rows]}), flush=True)


def figure(value: float | None) -> str:
    """Four digits; thousands are written out."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rounded(row: Row) -> dict[str, str | float | None]:
    """Six digits: more would only be noise."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in asdict(row).items()}
