"""Atomic writes of small files: after a crash the file has the whole old or the whole new contents."""

import os
import secrets
import stat
from pathlib import Path

from hybridflow.runtime.plain_files import require_regular_file


def write_bytes_atomically(path: str | Path, data: bytes) -> None:
    """Write a temporary file, fsync it, rename it to `path` and fsync the directory.

    On failure (for example a full disk) the OSError propagates, the old file is unchanged and the temporary file is
    removed. An existing file keeps its mode; for a symbolic link its target is replaced. A folder, a pipe and a device,
    such as /dev/null, are an OSError: they must not be replaced by a file.
    """
    target = Path(os.path.realpath(path))
    require_regular_file(target)
    partial = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)  # does not exist after the rename
    fsync_path(target.parent)


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write text as UTF-8 with `write_bytes_atomically`; line ends are not converted."""
    write_bytes_atomically(path, text.encode())


def fsync_path(path: str | Path) -> None:
    """Flush the contents of a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
