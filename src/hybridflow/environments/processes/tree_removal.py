"""Removal of a directory in which other programs wrote. Imports only the standard library."""

import os
import secrets


def remove_tree(directory: str) -> None:
    """Remove a directory, if it exists, with all that is in it; a link in its place is removed itself.

    Works without recursion, since the tree may be deeper than a path can name, and for directories without permissions.
    Raises OSError if something cannot be removed.
    """
    if os.path.islink(directory) or os.path.isfile(directory):
        os.unlink(directory)
    elif os.path.isdir(directory):
        os.chmod(directory, 0o700)
        _remove_contents(directory)
        os.rmdir(directory)


def _remove_contents(directory: str) -> None:
    """Remove the entries of a directory, and move those of its subdirectories up until none is left."""
    num_moved, moved = 0, secrets.token_hex(8)  # a name that no program has given to an entry
    while entries := list(os.scandir(directory)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                num_moved += 1
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # moving a directory needs write permission on it
                os.rename(inner.path, os.path.join(directory, f"{moved}-{num_moved}"))
            os.rmdir(entry.path)
