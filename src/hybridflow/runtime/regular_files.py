"""Check that a path is not a pipe or a device, from which a read could wait for ever or never end."""

import errno
import os
import stat
from pathlib import Path


def require_regular_file(path: str | Path) -> None:
    """Raise OSError if something other than a file is at the path; do nothing if there is nothing."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory; expected a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is a pipe, device or socket; expected a file", str(path))
