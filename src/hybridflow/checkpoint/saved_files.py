"""Files of a checkpoint as their writers report them, so that each process reads and hashes only what it wrote."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hybridflow.errors import CheckpointError
from hybridflow.runtime import note_progress, write_text_atomically
from hybridflow.runtime.fault_points import fault_point


class SavedFile(NamedTuple):
    """A file: its path relative to the checkpoint, its size in bytes and its SHA-256 in hexadecimal."""

    path: str
    num_bytes: int
    sha256: str


def saved_files(directory: Path, files: Iterable[Path]) -> list[SavedFile]:
    """Flush these files of a checkpoint directory to disk, and return their sizes and hashes. Raises OSError."""
    saved, written = [], list(files)
    for path in written:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            saved.append(SavedFile(path.relative_to(directory).as_posix(), file.tell(), digest))
        note_progress()
    fault_point("save", written[0] if written else None)
    return saved


REPORTS = "reports"
"""A folder of an unfinished checkpoint, in which ranks that write in the background report their files."""


def report_files(directory: Path, name: str, saved: Iterable[SavedFile]) -> None:
    """Write the report `name` on files that are complete, so that they count even if this process dies now."""
    (directory / REPORTS).mkdir(exist_ok=True)
    write_text_atomically(directory / REPORTS / f"{name}.json", json.dumps(list(saved)))


def take_reports(directory: Path) -> list[list[SavedFile]]:
    """Remove the reports of an unfinished checkpoint and return them."""
    reports = [
        [SavedFile(*entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
        for path in sorted((directory / REPORTS).glob("*.json"))
    ]
    shutil.rmtree(directory / REPORTS, ignore_errors=True)
    return reports


def require_shared(directory: Path) -> None:
    """Raise CheckpointError unless this process can see the checkpoint directory that the driver created."""
    if not directory.is_dir():
        raise CheckpointError(f"node {socket.gethostname()} has no '{directory}'. {SHARE_IT}")


SHARE_IT = "All nodes write into one directory; put trainer.run_dir on a file system that they share."
"""The fix for a directory that is not the same on all nodes."""
