"""Small files that are either the old one or the new one, whole, whenever the process or the machine dies."""

import os
import secrets
import stat
from pathlib import Path


def write_bytes_atomically(path: str | Path, data: bytes) -> None:
    """Write beside, fsync, rename over `path`, fsync the directory.

    If anything fails (a full disk, say) the OSError passes on, the old file is untouched and nothing is left beside
    it. An existing file keeps its mode; of a symbolic link the file it points to is replaced.
    """
    target = Path(os.path.realpath(path))
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
        partial.unlink(missing_ok=True)  # after the rename there is none
    fsync_path(target.parent)


def write_text_atomically(path: str | Path, text: str) -> None:
    """`write_bytes_atomically` of UTF-8; line ends are written as they are."""
    write_bytes_atomically(path, text.encode())


def fsync_path(path: str | Path) -> None:
    """Have the contents of a file, or the names in a directory, on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
