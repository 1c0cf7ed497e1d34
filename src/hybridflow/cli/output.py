"""What commands print and write: aligned columns, JSON, `--output FILE`, and files made from those of a run."""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.errors import DataConfigError
from hybridflow.runtime.files import write_text_atomically
from hybridflow.runtime.observe.jsonl import to_json_line
from hybridflow.runtime.observe.run_files import RunFiles
from hybridflow.runtime.plain_files import require_plain_file


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


def json_text(value: Any) -> str:
    """Return dictionaries, lists, texts and numbers as indented JSON."""
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--output FILE`; `what` names the rows in its help."""
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"also write {what} to this file, as JSON lines")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file atomically by rows as JSON lines. Raises DataConfigError if it cannot be written."""
    write_output(path, "".join(map(to_json_line, rows)))


def write_output(path: Path, text: str) -> None:
    """Replace a file atomically by a text. Raises DataConfigError if it cannot be written."""
    with _naming(path):
        write_text_atomically(path, text)


COMPARED = 15
"""First characters in which an older file of the same kind equals the new one."""


def write_derived_file(path: Path, text: str, runs: Sequence[RunFiles]) -> None:
    """Replace a file atomically by a text.

    Raises DataConfigError if it cannot be written, and for a file in the directory of a run that begins with other
    characters than the text: it is the run's.
    """
    with _naming(path):
        require_plain_file(path)  # a link could lead to any file
        if path.exists() and any(path.resolve().is_relative_to(run.path.resolve()) for run in runs):
            with open(path, "rb") as file:
                if file.read(COMPARED) != text[:COMPARED].encode():
                    raise DataConfigError(f"--output={path} is a file of the run; name a file that may be replaced.")
        write_text_atomically(path, text)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DataConfigError(f"--output={path} cannot be written: {reason}.") from error
