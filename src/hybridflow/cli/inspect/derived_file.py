"""A file that a command makes from the files of runs, such as a page, and that must replace none of these."""

from collections.abc import Sequence
from pathlib import Path

from hybridflow.errors import DataConfigError
from hybridflow.runtime import require_plain_file, write_text_atomically
from hybridflow.runtime.observe.run_files import RunFiles

COMPARED = 15
"""First characters in which an older file of the same kind equals the new one."""


def write_derived_file(path: Path, text: str, runs: Sequence[RunFiles]) -> None:
    """Replace a file atomically by a text.

    Raises DataConfigError if it cannot be written, and for a file in the directory of a run that begins with other
    characters than the text: it is the run's.
    """
    try:
        require_plain_file(path)  # a link could lead to any file
        if path.exists() and any(path.resolve().is_relative_to(run.path.resolve()) for run in runs):
            with open(path, "rb") as file:
                if file.read(COMPARED) != text[:COMPARED].encode():
                    raise DataConfigError(f"--output={path} is a file of the run; name a file that may be replaced.")
        write_text_atomically(path, text)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DataConfigError(f"--output={path} cannot be written: {reason}.") from error
