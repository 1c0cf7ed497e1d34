"""List the runs of a directory: kind, recipe, step, reward or loss, state, and how long ago it was written.

A run is a directory with run.json. `stopped`: the same command continues it. `failed`: so too, but it was killed or had
an error, and the steps after its newest checkpoint are made again.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.output import aligned, json_text
from hybridflow.errors import DataConfigError
from hybridflow.runtime.observe.run_files import printable

if TYPE_CHECKING:
    from hybridflow.cli.inspect.run_table import RunRow

MB = 1e6

SORTS: dict[str, Callable[["RunRow"], Any]] = {
    "name": lambda row: row.path,
    "started": lambda row: -row.started,
    "written": lambda row: -row.written,
    "step": lambda row: -row.step,
    "value": lambda row: _best_first(row.figure, row.value),
    "validation": lambda row: _best_first(row.val_figure, row.val_value),
    "size": lambda row: -row.checkpoint_bytes,
    "state": lambda row: row.state,
}
"""The order of rows by the name of a sort: the newest, longest, best and largest runs first."""


def _best_first(figure: str, value: float | None) -> tuple[bool, str, bool, float]:
    if value is None or math.isnan(value):
        return not figure, figure, True, 0.0
    return not figure, figure, False, value if figure.endswith("loss") else -value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the directory, the order and the format."""
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs"), metavar="DIR", help="default: runs")
    parser.add_argument(
        "--sort", choices=SORTS, default="name", help="order (default: name); others: newest, best or largest first"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with times in seconds since 1970")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from hybridflow.cli.inspect.run_table import list_runs

    if not args.directory.is_dir():
        raise DataConfigError(f"'{args.directory}' is not a directory; name one that has runs: hybridflow runs DIR.")
    rows = sorted(list_runs(args.directory), key=SORTS[args.sort])
    if args.json:
        print(json_text([{**asdict(row), "path": str(row.path)} for row in rows]))
    elif rows:
        print("\n".join(_lines(rows, args.directory)))
    else:
        print(printable(f"no run in '{args.directory}': a run is a directory with run.json"))
    return 0


def _lines(rows: list["RunRow"], directory: Path) -> list[str]:
    from hybridflow.cli.inspect.run_table import age

    head = ["run", "kind", "recipe", "step", "figure", "value", "validation", "state", "started", "written", "size"]
    cells = [
        [
            printable(str(row.path.relative_to(directory) if row.path != directory else row.path)),
            printable(row.kind) or "-",
            printable(row.recipe) or "-",
            "-" if row.problem else f"{row.step}/{row.total_steps or '?'}",
            row.figure or row.val_figure or "-",
            "-" if row.value is None else f"{row.value:.4g}",
            "-" if row.val_value is None else f"{row.val_value:.4g}",
            row.state,
            age(row.started),
            age(row.written),
            f"{row.checkpoint_bytes / MB:.1f} MB" if row.checkpoint_bytes else "-",
        ]
        for row in rows
    ]
    problems = [printable(f"{row.path}: {row.problem}") for row in rows if row.problem]
    return [*aligned([head, *cells]), *([""] if problems else []), *problems]
