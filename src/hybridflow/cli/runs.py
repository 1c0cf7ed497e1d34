"""List the runs of a directory: kind, recipe, step, reward or loss, state, and how long ago it was written.

A run is a directory with run.json. `stopped`: its command continues it.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.aligned import aligned
from hybridflow.errors import DataConfigError

if TYPE_CHECKING:
    from hybridflow.observability.run_table import RunRow

SORTS: dict[str, Callable[["RunRow"], Any]] = {
    "name": lambda row: str(row.path),
    "written": lambda row: -row.written,
    "value": lambda row: (row.figure, -(row.value if row.value is not None else float("-inf"))),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the directory, the order and the format."""
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs"), metavar="DIR", help="default: runs")
    parser.add_argument("--sort", choices=SORTS, default="name", help="order (default: name; written: newest first)")
    parser.add_argument("--json", action="store_true", help="print JSON, with times in seconds since 1970")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from hybridflow.observability.run_table import list_runs

    if not args.directory.is_dir():
        raise DataConfigError(f"'{args.directory}' is not a directory; name one with runs, such as runs.")
    rows = sorted(list_runs(args.directory), key=SORTS[args.sort])
    if args.json:
        print(json.dumps([{**asdict(row), "path": str(row.path)} for row in rows], indent=1))
    elif rows:
        print("\n".join(_lines(rows, args.directory)))
    else:
        print(f"no run in '{args.directory}': a run is a directory with run.json")
    return 0


def _lines(rows: list["RunRow"], directory: Path) -> list[str]:
    from hybridflow.observability.run_table import age

    head = ["run", "kind", "recipe", "step", "figure", "value", "val score", "state", "started", "written"]
    cells = [
        [
            str(row.path.relative_to(directory)),
            row.kind or "-",
            row.recipe or "-",
            f"{row.step}/{row.total_steps or '?'}",
            row.figure or "-",
            "-" if row.value is None else f"{row.value:.4g}",
            "-" if row.val_score is None else f"{row.val_score:.4g}",
            row.state,
            age(row.started),
            age(row.written),
        ]
        for row in rows
    ]
    problems = [f"{row.path}: {row.problem}" for row in rows if row.problem]
    return [*aligned([head, *cells]), *([""] if problems else []), *problems]
