"""The option `--output FILE`: results as JSON lines."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import DataConfigError


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--output FILE`; `what` names the rows in its help."""
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"also write {what} to this file, as JSON lines")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file atomically by rows as JSON lines. Raises DataConfigError if it cannot be written."""
    from hybridflow.runtime.observe.jsonl import to_json_line

    write_output(path, "".join(map(to_json_line, rows)))


def write_output(path: Path, text: str) -> None:
    """Replace a file atomically by a text. Raises DataConfigError if it cannot be written."""
    from hybridflow.runtime import write_text_atomically

    try:
        write_text_atomically(path, text)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DataConfigError(f"--output {path} cannot be written: {reason}.") from error
