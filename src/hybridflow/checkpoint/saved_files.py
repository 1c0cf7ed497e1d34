"""Files of a checkpoint: JSON with its format, and what writers report: each process hashes only what it wrote."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import CheckpointError
from hybridflow.runtime.fault_points import fault_point
from hybridflow.runtime.files import write_text_atomically
from hybridflow.runtime.plain_files import open_plain_file
from hybridflow.runtime.progress import note_progress


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the CheckpointError for this cause, which names the file once and ends with a full stop."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".").removesuffix(f": {path}")
    if reason.startswith(f"'{path}'"):  # not a regular file
        return CheckpointError(f"{reason}.")
    return CheckpointError(f"'{path}' cannot be read: {reason}.")


def read_document(path: Path, format_name: str, version: int) -> dict[str, Any]:
    """Read a JSON file. Raises CheckpointError unless it is readable and has this format and version."""
    try:
        with open_plain_file(path) as file:
            document = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"'{path}' is missing.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' cannot be read as JSON: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != format_name:
        raise CheckpointError(f"'{path}' is JSON, but not a {format_name}; hybridflow did not write it.")
    if document.get("version") != version:
        raise CheckpointError(
            f"'{path}' has format version {document.get('version')!r}, but this hybridflow reads version {version}; "
            "use the version of hybridflow that wrote it, or a newer one."
        )
    return document


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
