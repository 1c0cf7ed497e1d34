"""The file system on which runs are written: space, atomic renames and locks."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from hybridflow.doctor.finding import Finding
from hybridflow.runtime.disk_space import describe_bytes

LEAST_FREE = 5 * 2**30
"""Bytes for two checkpoints of a small model; `hybridflow memory` tells what a run needs."""

NAME = "run directory"


def check_run_directory(directory: Path, least_free: int = LEAST_FREE) -> Finding:
    """Write, rename and lock a file in the nearest directory that exists."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        return Finding(NAME, "error", f"'{existing}' is not a directory", "name another one by --dir")
    try:
        with tempfile.TemporaryDirectory(prefix=".hybridflow-doctor-", dir=existing) as scratch:
            first, second = Path(scratch) / "a", Path(scratch) / "b"
            first.write_text("new")
            second.write_text("old")
            os.replace(first, second)
            if first.exists() or second.read_text() != "new":
                return Finding(NAME, "error", f"'{existing}' does not replace files", "use another file system")
            has_locks = _can_lock(second)
    except OSError as error:
        return Finding(NAME, "error", f"'{existing}' cannot be written: {error}", "name another one by --dir")
    free = shutil.disk_usage(existing).free
    text = f"{describe_bytes(free)} free in '{existing}'"
    if not has_locks:
        fix = "two processes in one run directory are not noticed there; start each run once, or use a local disk"
        return Finding(NAME, "warning", f"{text}; its file system has no locks", fix)
    if free < least_free:
        return Finding(
            NAME, "warning", text, "checkpoints take twelve bytes a parameter; free space, or name another disk"
        )
    return Finding(NAME, "ok", f"{text}, with atomic renames and locks")


def _can_lock(file: Path) -> bool:
    """Return whether a lock that one descriptor holds keeps another from it."""
    with open(file) as holder, open(file) as other:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False
