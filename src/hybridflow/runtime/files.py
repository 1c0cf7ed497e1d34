"""Files that are written atomically, and the free space of their disk."""

import errno
import json
import os
import secrets
import shutil
import stat
from pathlib import Path


def require_regular_file(path: str | Path) -> None:
    """Raise OSError if `path` exists and is not a regular file or a link to one, for files that a user names."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory; expected a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is a pipe, device or socket; expected a file", str(path))


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


def sort_metadata(path: str | Path) -> None:
    """Sort the metadata in the header of a safetensors file, in place.

    The library writes it in the order of a hash map, which differs from one file to the next: files with equal contents
    would differ. The length of the header does not change.
    """
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        assert len(text) == length, f"the header of '{path}' has {length} bytes and would have {len(text)}"
        file.seek(8)
        file.write(text)


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def describe_bytes(num_bytes: int) -> str:
    """Format a size with its binary unit: 1536 -> '1.5 KiB'."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} bytes" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def describe_free_space(directory: Path) -> str:
    """Return the free space on the file system of an existing directory, as text."""
    return f"{describe_bytes(shutil.disk_usage(directory).free)} free on the file system of '{directory}'"
