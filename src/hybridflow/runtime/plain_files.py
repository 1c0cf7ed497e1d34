"""Files that are read: regular files only, found without opening anything else.

Links, FIFOs and devices are refused before they are opened: reading those may never end.
"""

import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_plain_file(path: str | Path) -> None:
    """Raise OSError, naming what it is, if `path` exists and is not a regular file; a symbolic link is not one."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(f"'{path}' is {_KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a regular file")


def require_no_links(directory: str | Path) -> None:
    """Raise OSError if an entry of a directory is a symbolic link: what it leads to belongs to others."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_symlink():
                raise OSError(f"'{entry.path}' is a symbolic link, not a directory or a file")


def open_plain_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Raises OSError as `require_plain_file`, and if the file cannot be read."""
    require_plain_file(path)
    # The flags and the second check are for a file that is replaced meanwhile.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"'{path}' is not a regular file")
    return os.fdopen(descriptor, "rb")
