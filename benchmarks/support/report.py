"""The output of a benchmark: text tables, the command, and one JSON object as the last line.

    {"benchmark": "rollout", "commit": "0123456789", "smoke": false, "rows": [{"name": ..., "unit": ..., ...}, ...]}

A row has the keys of `Row`. `commit` is the measured commit, with "+ uncommitted changes" if there were some.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from support.commit import describe_commit
from support.side import Side


@dataclass(frozen=True)
class Row:
    """One figure. `ratio`: how many times better than the peer, or than `limit` if there is no peer.

    `limit` is the bound of the figure that the benchmark documents, such as the peak of the matrix product.
    """

    name: str
    unit: str
    ours: float
    peer: float | None = None
    limit: float | None = None
    ratio: float | None = None


def print_sides(sides: Sequence[Side], threads: int) -> None:
    """Print the threads and the versions of the compared sides."""
    versions = {side.system: " ".join(f"{name} {version}" for name, version in side.versions.items()) for side in sides}
    print(f"threads on every side: {threads}; " + "; ".join(dict.fromkeys(versions.values())), flush=True)


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table with columns as wide as their widest cell; the first is left-aligned, the others right-aligned."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    print(f"\n{title}")
    for line in (header, *lines):
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def print_rows(benchmark: str, rows: Sequence[Row], *, smoke: bool) -> None:
    """Print all rows as a table, the command and the commit, and as the last line the same as JSON."""
    header = ("name", "unit", "ours", "peer", "limit", "ratio")
    cells = [(row.name, row.unit, *map(figure, (row.ours, row.peer, row.limit, row.ratio))) for row in rows]
    print_table(f"{benchmark} (ratio: how many times better than the peer)", header, cells)
    commit = describe_commit()
    print(f"\ncommand: .venv/bin/python benchmarks/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}")
    print(f"commit: {commit}")
    result = {"benchmark": benchmark, "commit": commit, "smoke": smoke, "rows": [_rounded(row) for row in rows]}
    print(json.dumps(result), flush=True)


def figure(value: float | None) -> str:
    """Format a number with four digits, or with all digits of its integer part; None is "-"."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rounded(row: Row) -> dict[str, str | float | None]:
    """Return the row as a dictionary, its numbers rounded to six digits: more would be noise."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in asdict(row).items()}
