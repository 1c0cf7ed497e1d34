"""Files that are read: regular files only, found without opening anything else.

Links, FIFOs and devices are refused before they are opened: reading those may never end.
"""

import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

LARGEST_TEXT = 1 << 30
"""Bytes of a file that is read whole, such as a configuration or a vocabulary, beyond which it is not one."""

_READ_OF_MODELS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")

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
    with suppress(FileNotFoundError):
        _require_regular(path, os.lstat(path).st_mode)


def _require_regular(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"'{path}' is {_KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a regular file")


def require_no_links(directory: str | Path) -> None:
    """Raise OSError if a symbolic link stands for a subdirectory: what it leads to belongs to others."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_symlink() and not entry.is_file():
                raise OSError(f"'{entry.path}' is a symbolic link, not a directory")


def require_text_file(path: str | Path) -> None:
    """Raise OSError if `path` exists and is not a regular file, or a link to one, of at most `LARGEST_TEXT` bytes."""
    with suppress(FileNotFoundError):
        found = os.stat(path)
        _require_regular(path, found.st_mode)
        if found.st_size > LARGEST_TEXT:
            raise OSError(f"'{path}' has {found.st_size:,} bytes, more than any file of its kind")


def require_model_files(directory: str | Path) -> None:
    """Raise OSError if a file that libraries read from a model directory is a FIFO, a device, a directory or too large.

    Only weights may be larger than `LARGEST_TEXT`.
    """
    for folder in (Path(directory), Path(directory, "additional_chat_templates")):
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            if name.endswith(".safetensors") and (folder / name).is_file():
                continue
            if name.endswith(_READ_OF_MODELS):
                require_text_file(folder / name)


def open_plain_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Raises OSError as `require_plain_file`, and if the file cannot be read."""
    require_plain_file(path)
    # The flags and the second check are for a file that is replaced meanwhile.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"'{path}' is not a regular file")
    return os.fdopen(descriptor, "rb")
